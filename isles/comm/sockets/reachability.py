"""Can one machine reach another, and how fast is the link? Asked before gloo or a pair needs it, whose own answer would
be a time-out.

The machine that is to be reached opens an `EchoServer` and tells the others its port, in a fixed world one that the
system picks; each of them asks it for an echo:

    echo_failure(address, port, name)  ---- {"echo": token} ----------------->   EchoServer
                                       <-- {"echoed": token, "name": name} ---
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from isles.base.parsing import OneLine, table, value_of
from isles.comm.sockets.addresses import listen
from isles.comm.sockets.connection import BadFrame, close, heard, packed, reason
from isles.comm.sockets.listener import Listener
from isles.comm.sockets.proof import dial

PATIENCE = 5.0  # seconds for an echo
_LONGEST = 256  # bytes of a question, and of an answer
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


class EchoServer(Listener):
    """Returns every token that it is sent at the address `host` while the context is open. port: 0 for one that the
    system picks. name: by which it is told from others. seconds, raw: as of `Listener`. ValueError where the address
    cannot be had.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        name: str = "",
        seconds: float = PATIENCE,
        raw: Callable[[socket.socket], Awaitable[bool]] | None = None,
    ) -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = table(await heard(reader, _LONGEST), "the question")
            writer.write(packed({"echoed": value_of(asked, "echo", OneLine), "name": name}))
            await close(writer)

        listening = listen(port, host)
        self.port: int = listening.getsockname()[1]
        super().__init__(listening, echo, seconds=seconds, raw=raw)


async def echo_failure(address: str, port: int, name: str = "", seconds: float = PATIENCE) -> str:
    """Empty where the echo server of that name answers at `address`, else why it does not, as in "no answer within
    5 s". In the loop's thread.
    """
    token = secrets.token_hex(8)
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await dial(address, port, seconds)
            try:
                writer.write(packed({"echo": token}))
                answer = await heard(reader, _LONGEST)
            finally:
                writer.transport.abort()
    except (OSError, EOFError, BadFrame) as error:
        return reason(error, seconds)
    except ValueError:
        return "it is no address"
    return "" if answer == {"echoed": token, "name": name} else "something else answers there"


def port_range() -> str:
    """The ports that this system picks from, as in "32768-60999": what a firewall must let through."""
    try:
        first, last = _PORTS.read_text().split()
    except (OSError, ValueError):
        first, last = "49152", "65535"  # IANA's, which other systems keep to
    return f"{first}-{last}"


_PINGS = 20
_SMALLEST = 1 << 16  # bytes
_ENOUGH = 0.4  # seconds that a question must take to be a measurement


class LinkRates(NamedTuple):
    """out, back: bytes a second to the other side and from it. round_trip: median seconds."""

    out: float
    back: float
    round_trip: float


def measure_link(ask: Callable[[int, int], object], largest: int) -> LinkRates:
    """Measured now, within some seconds. ask: says so many bytes, and returns once as many as the second number have
    come back; what it raises ends it. largest: bytes of one question, and of an answer.
    """

    def timed(out: int, back: int) -> float:
        began = time.perf_counter()
        ask(out, back)
        return time.perf_counter() - began

    def rate(timed: Callable[[int], float]) -> float:
        size, best = _SMALLEST, 0.0
        while (seconds := timed(size)) < _ENOUGH:
            best = max(best, size / seconds)
            if size >= largest:
                return best
            size *= 2
        return size / seconds

    round_trip = statistics.median(timed(0, 0) for _ in range(_PINGS))
    return LinkRates(rate(lambda size: timed(size, 0)), rate(lambda size: timed(0, size)), round_trip)
