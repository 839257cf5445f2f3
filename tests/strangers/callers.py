"""What strangers say to a port, and how a test says it."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
from collections.abc import Iterator

from isles.comm import credentials
from isles.comm.credentials import Token

HEAD = struct.Struct(">4sI")
ESCAPES = "\x1b[2J\x1b]0;owned\x07\nisles: node 0 won\u202e\u2028\ud800"


def framed(body: bytes) -> bytes:
    """A frame with whatever body."""
    return HEAD.pack(b"isle", len(body)) + body


GARBAGE: dict[str, bytes] = {
    "nothing": b"",
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(5000),
    "nested": framed(b"[" * 200_000),
    "nested tables": framed(b'{"a":' * 12_000),
    "16 MB announced": HEAD.pack(b"isle", 16 << 20) + b"x" * 1000,
    "4 GB announced": HEAD.pack(b"isle", (1 << 32) - 1),
    "half a frame": framed(b'{"doctor": "1"}')[:-5],
    "half a TLS hello": bytes.fromhex("16030100c8010000c40303") + bytes(20),
    "no JSON": framed(b"\xff\xfe{,}"),
    "a number without end": framed(b"1" * 60_000),
    "wrong fields": framed(b'{"doctor": 1, "port": 1e400, "ports": null}'),
    "a huge port": framed(b'{"doctor": "0.1", "port": 1%s, "ports": ""}' % (b"0" * 30)),
}


def call(port: int, said: bytes = b"", host: str = "127.0.0.1") -> socket.socket:
    """A connection on which `said` was said."""
    connection = socket.create_connection((host, port), timeout=10.0)
    say(connection, said)
    return connection


def say(connection: socket.socket, said: bytes) -> None:
    """As much of it as the other side takes before it cuts off."""
    with contextlib.suppress(OSError):
        connection.sendall(said)


def reset(port: int) -> None:
    """Connect, and break it off at once."""
    with call(port) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@contextlib.contextmanager
def many(port: int, number: int) -> Iterator[list[socket.socket]]:
    """So many connections on which nothing is said."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(call(port))) for _ in range(number)]


@contextlib.contextmanager
def tls(port: int) -> Iterator[ssl.SSLSocket]:
    """A connection that speaks TLS, with a certificate that nobody looked at."""
    with call(port) as connection, credentials.unverified_context().wrap_socket(connection) as line:
        yield line


def prove(line: socket.socket, token: Token, speaker: str = "node") -> bool:
    """Go through the proof as a node; whether node 0 takes it."""
    own = credentials.challenge()
    line.sendall(own)
    theirs = read(line, 32)
    line.sendall(b"y" + credentials.proof(token, speaker, own, theirs))
    given = read(line, 32)
    return credentials.proved(given, token, "node 0", theirs, own)


def read(line: socket.socket, size: int) -> bytes:
    """Up to `size` bytes; fewer where the other side ends."""
    data = b""
    with contextlib.suppress(OSError):
        while len(data) < size and (piece := line.recv(size - len(data))):
            data += piece
    return data
