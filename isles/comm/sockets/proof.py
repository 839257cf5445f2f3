"""Before a machine is let into a run, on a connection that speaks TLS 1.3: both sides prove that they know the token.

    node                                          node 0
    its challenge, 32 bytes             ------>
                                        <------   its challenge, 32 bytes
    what it thinks of the certificate   ------>   one byte, so that both sides can say why it goes
    its proof, 32 bytes                 ------>   the first that node 0 acts on; wrong: closed without a word
                                        <------   node 0's proof, 32 bytes

The node has compared the certificate with the token before it says a word: what it says is for the machine that
made the token. Challenges are new for every connection, so nothing that was overheard is of use again. Nothing is
parsed here.
"""

from __future__ import annotations

import asyncio
import datetime
import hmac

from isles.comm import credentials
from isles.comm.credentials import Token
from isles.comm.sockets.lost import LinkLost

_SIZE = 32  # bytes of a challenge, and of a proof
_GOOD, _OTHER, _EXPIRED = b"y", b"o", b"e"
_GONE = {
    _OTHER: "it has the token of another run",
    _EXPIRED: "by its clock the certificate of the token has expired; look at both clocks, or make a new token",
}


class TokenRefused(ValueError):
    """The other side is not of this token, or does not take it."""


async def prove_as_host(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: Token) -> None:
    """Node 0's side. LinkLost, with words for node 0's user, where the other one does not prove that it knows it."""
    own = credentials.challenge()
    try:
        theirs = await reader.readexactly(_SIZE)
        writer.write(own)
        opinion = await reader.readexactly(1)
        if opinion != _GOOD:
            raise LinkLost(_GONE.get(opinion, "it does not speak as isles does"))
        given = await reader.readexactly(_SIZE)
    except EOFError:
        raise LinkLost("it left without a proof that it knows the token") from None
    if not credentials.proved(given, token, "node", theirs, own):
        raise LinkLost("it does not know the token of this run")
    writer.write(credentials.proof(token, "node 0", own, theirs))
    await writer.drain()


async def prove_as_node(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: Token, where: str) -> None:
    """The other side, which looks at the certificate first. TokenRefused, with words for its user."""
    own = credentials.challenge()
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    opinion = _opinion(certificate, token)
    writer.write(own)
    theirs = await reader.readexactly(_SIZE)
    writer.write(opinion)
    if opinion == _OTHER:
        await writer.drain()
        raise TokenRefused(f"what answers at {where} is not the machine of this token: look at address and token")
    if opinion == _EXPIRED:
        await writer.drain()
        raise TokenRefused(
            f"by this machine's clock the certificate of {where} has expired; look at both clocks, or make a new token"
        )
    writer.write(credentials.proof(token, "node", own, theirs))
    try:
        given = await reader.readexactly(_SIZE)
    except (EOFError, OSError):
        raise TokenRefused(f"{where} does not take this token; copy the one that node 0 shows") from None
    if not credentials.proved(given, token, "node 0", theirs, own):
        raise TokenRefused(f"{where} does not know the token of this run")


def _opinion(certificate: bytes | None, token: Token) -> bytes:
    if not certificate or not hmac.compare_digest(credentials.fingerprint(certificate), token.fingerprint):
        return _OTHER
    return _EXPIRED if credentials.expired(certificate, datetime.datetime.now(datetime.UTC)) else _GOOD
