"""Mutual authentication on a TLS 1.3 connection before a machine is admitted: both sides prove that they know the
token.

    node                                          node 0
    its challenge, 32 bytes             ------>
                                        <------   its challenge, 32 bytes
    what it thinks of the certificate   ------>   one byte, so that both sides can say why it goes
    its proof, 32 bytes                 ------>   the first that node 0 acts on; wrong: it sends 32 zeros and closes
                                        <------   node 0's proof, 32 bytes

The node compares the certificate with the token before it sends anything, because what it sends is meant for the
machine that made the token. Challenges are new for every connection, so an overheard proof is useless. Nothing is
parsed here.
"""

from __future__ import annotations

import asyncio
import datetime
import hmac
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from isles.comm import credentials
from isles.comm.credentials import Token
from isles.comm.sockets.connection import STRANGERS, LinkLost, ends
from isles.comm.tcp import written

_SIZE = 32  # bytes of a challenge, and of a proof
_GOOD, _OTHER, _EXPIRED = b"y", b"o", b"e"
_GONE = {
    _OTHER: "it has the token of another run",
    _EXPIRED: "by its clock the certificate of the token has expired; look at both clocks, or make a new token",
}
Read = Callable[[int], Awaitable[bytes]]
"""Reads exactly so many bytes. EOFError or OSError if fewer arrive."""
Write = Callable[[bytes], object]
T = TypeVar("T")


class TokenRefused(ValueError):
    """The other side does not have this token, or refuses it."""


class SecretRefused(TokenRefused):
    """The token's second half is another one than the host's."""


async def prove_as_host(read: Read, write: Write, token: Token) -> None:
    """Node 0's side. LinkLost, with a text for its user, if the other side does not prove that it knows the token."""
    own = credentials.challenge()
    try:
        theirs = await read(_SIZE)
        write(own)
        opinion = await read(1)
        if opinion != _GOOD:
            raise LinkLost(_GONE.get(opinion, "it does not speak as isles does"))
        answer = await read(_SIZE)
    except EOFError:
        raise LinkLost("it left without a proof that it knows the token") from None
    if not credentials.proved(answer, token, "node", theirs, own):
        write(bytes(_SIZE))  # so that a wrong token can be told from a host that closes connections
        raise LinkLost("it does not know the token of this run")
    write(credentials.proof(token, "node 0", own, theirs))


async def prove_as_node(read: Read, write: Write, token: Token, certificate: bytes | None, where: str) -> None:
    """The other side, which checks the certificate first. TokenRefused, with a text for its user; LinkLost if the host
    closes the connection.
    """
    own = credentials.challenge()
    opinion = _opinion(certificate, token)
    write(own)
    theirs = await read(_SIZE)
    if opinion != _GOOD:
        write(opinion)
        if opinion == _OTHER:
            raise TokenRefused(f"what answers at {where} is not the machine of this token: look at address and token")
        raise TokenRefused(
            f"by this machine's clock the certificate of {where} has expired; look at both clocks, or make a new token"
        )
    write(opinion + credentials.proof(token, "node", own, theirs))
    try:
        answer = await read(_SIZE)
    except (EOFError, OSError):
        raise LinkLost("it closed the connection during the proof of the token: it may be busy") from None
    if answer == bytes(_SIZE):
        raise SecretRefused(f"{where} does not take this token; copy the one that it shows")
    if not credentials.proved(answer, token, "node 0", theirs, own):
        raise TokenRefused(f"{where} does not know the token of this run")


def blocking(proof: Coroutine[Any, Any, T]) -> T:
    """The result of a proof over a `read` that blocks, outside of a loop."""
    try:
        proof.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("its `read` does not block")


async def dial(
    host: str, port: int, seconds: float, token: Token | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection within `seconds`, in the loop's thread. With `token`: in TLS, to the machine that made it, after
    both have proved that they know it. TokenRefused, or an error for `connection.reason`.
    """
    running = asyncio.get_running_loop()
    async with asyncio.timeout(seconds):
        places = await running.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # All addresses of the name in turn; the error of the last one counts.
        for left, (family, kind, _, _, address) in zip(range(len(places))[::-1], places, strict=True):
            connection = socket.socket(family, kind)
            connection.setblocking(False)
            try:
                await running.sock_connect(connection, address)
                break
            except BaseException as error:
                connection.close()
                if not left or not isinstance(error, OSError):
                    raise
        if token is None:
            return await asyncio.open_connection(sock=connection, limit=STRANGERS)
        tls = credentials.unverified_context()  # `prove_as_node` compares the certificate
        reader, writer = await asyncio.open_connection(sock=connection, ssl=tls, server_hostname=credentials.NAME)
        try:
            certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            where = written(ends(writer)[1], port)
            await prove_as_node(reader.readexactly, writer.write, token, certificate, where)
        except BaseException:
            writer.close()
            raise
        return reader, writer


def _opinion(certificate: bytes | None, token: Token) -> bytes:
    if not certificate or not hmac.compare_digest(credentials.fingerprint(certificate), token.fingerprint):
        return _OTHER
    return _EXPIRED if credentials.expired(certificate, datetime.datetime.now(datetime.UTC)) else _GOOD
