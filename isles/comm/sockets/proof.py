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
import contextlib
import datetime
import hmac
import socket
from collections.abc import Callable, Generator

from isles.comm import credentials
from isles.comm.credentials import Token
from isles.comm.sockets.addresses import written
from isles.comm.sockets.frames import STRANGERS
from isles.comm.sockets.lost import LinkLost, ends

_SIZE = 32  # bytes of a challenge, and of a proof
_GOOD, _OTHER, _EXPIRED = b"y", b"o", b"e"
_GONE = {
    _OTHER: "it has the token of another run",
    _EXPIRED: "by its clock the certificate of the token has expired; look at both clocks, or make a new token",
}
ProofSteps = Generator[tuple[bytes, int], bytes, None]
"""What is said, and how many bytes are then waited for."""


class TokenRefused(ValueError):
    """The other side is not of this token, or does not take it."""


class SecretRefused(TokenRefused):
    """It does not take it, or takes nobody at the moment: it closed the connection."""


def host_steps(token: Token) -> ProofSteps:
    """Node 0's side. LinkLost, with words for node 0's user, where the other one does not prove that it knows it."""
    own = credentials.challenge()
    try:
        theirs = yield b"", _SIZE
        opinion = yield own, 1
        if opinion != _GOOD:
            raise LinkLost(_GONE.get(opinion, "it does not speak as isles does"))
        given = yield b"", _SIZE
    except EOFError:
        raise LinkLost("it left without a proof that it knows the token") from None
    if not credentials.proved(given, token, "node", theirs, own):
        raise LinkLost("it does not know the token of this run")
    yield credentials.proof(token, "node 0", own, theirs), 0


def node_steps(token: Token, certificate: bytes | None, where: str) -> ProofSteps:
    """The other side, which looks at the certificate first. TokenRefused, with words for its user."""
    own = credentials.challenge()
    opinion = _opinion(certificate, token)
    theirs = yield own, _SIZE
    if opinion != _GOOD:
        yield opinion, 0
        if opinion == _OTHER:
            raise TokenRefused(f"what answers at {where} is not the machine of this token: look at address and token")
        raise TokenRefused(
            f"by this machine's clock the certificate of {where} has expired; look at both clocks, or make a new token"
        )
    try:
        given = yield opinion + credentials.proof(token, "node", own, theirs), _SIZE
    except (EOFError, OSError):
        raise SecretRefused(f"{where} does not take this token; copy the one that node 0 shows") from None
    if not credentials.proved(given, token, "node 0", theirs, own):
        raise TokenRefused(f"{where} does not know the token of this run")


def drive(steps: ProofSteps, write: Callable[[bytes], object], read: Callable[[int], bytes]) -> None:
    """Take the steps on a connection that blocks; read: exactly so many bytes, or EOFError."""
    with contextlib.suppress(StopIteration):
        said, size = next(steps)
        while True:
            write(said)
            try:
                came = read(size) if size else b""
            except (EOFError, OSError) as error:
                said, size = steps.throw(error)
            else:
                said, size = steps.send(came)


async def prove_as_host(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: Token) -> None:
    """`host_steps` in the loop's thread."""
    await _drive(host_steps(token), reader, writer)


async def dial(
    host: str, port: int, seconds: float, token: Token | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection within `seconds`, in the loop's thread; with `token`: in TLS, to the machine that made it, once both
    have proved that they know it. TokenRefused, or what `lost.reason` has words for.
    """
    own = asyncio.get_running_loop()
    async with asyncio.timeout(seconds):
        places = await own.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for left, (family, kind, _, _, address) in zip(range(len(places))[::-1], places, strict=True):
            connection = socket.socket(family, kind)
            connection.setblocking(False)
            try:
                await own.sock_connect(connection, address)
                break
            except BaseException as error:
                connection.close()
                if not left or not isinstance(error, OSError):
                    raise
        if token is None:
            return await asyncio.open_connection(sock=connection, limit=STRANGERS)
        tls = credentials.unverified_context()  # `node_steps` compares the certificate
        reader, writer = await asyncio.open_connection(sock=connection, ssl=tls, server_hostname=credentials.NAME)
        try:
            certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            await _drive(node_steps(token, certificate, written(ends(writer)[1], port)), reader, writer)
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer


async def _drive(steps: ProofSteps, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(StopIteration):
        said, size = next(steps)
        while True:
            writer.write(said)
            await writer.drain()
            try:
                came = await reader.readexactly(size) if size else b""
            except (EOFError, OSError) as error:
                said, size = steps.throw(error)
            else:
                said, size = steps.send(came)


def _opinion(certificate: bytes | None, token: Token) -> bytes:
    if not certificate or not hmac.compare_digest(credentials.fingerprint(certificate), token.fingerprint):
        return _OTHER
    return _EXPIRED if credentials.expired(certificate, datetime.datetime.now(datetime.UTC)) else _GOOD
