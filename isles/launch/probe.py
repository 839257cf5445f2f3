"""How `isles doctor` and `isles plan --links probe:HOST:PORT` measure the link to another machine: whether each
direction is open, the round trip and the rates.

caller (--peer, --links probe:)                          host (--listen)
{"doctor": version, "port": echo port}         ------>
                                               <------   {"doctor": version, "port": echo port, "ports": range}
asks for an echo, sends {"reached": reason}    <----->   asks for an echo, sends {"reached": reason}
{"fill": text} some times, {"want": times}     ------>
                                               <------   {"fill": text} so many times, {"want": 0}
... until both rates are known; {"round_trip": seconds, "out": bytes/s, "back": bytes/s}   ------>
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from isles.base.parsing import Int, Nonnegative, OneLine, Port, Unfit, table, value_of
from isles.base.version import __version__
from isles.comm.sockets import loop
from isles.comm.sockets.connection import STRANGERS, BadFrame, LinkLost, close, ends, heard, packed, reason
from isles.comm.sockets.listener import PATIENCE, EchoServer, Listener, Throttle, echo_failure, measure_link, port_range
from isles.comm.sockets.proof import dial

_CHUNK = "x" * (1 << 15)  # 32 kB: half the longest message of an unauthenticated peer
_LARGEST = 1 << 11  # chunks of a burst
_Chunks = Annotated[Int, Field(ge=0, le=_LARGEST)]
_ANSWER = 60.0  # seconds: a burst of two chunks at 10 kbit/s
_LASTING = 300.0  # the most seconds for all checks with one caller
_GLANCE = 0.05  # seconds between polls


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What one side found out about the other.

    out, back: empty if that direction is open, else why not. port_out, port_back: the tried ports. ports_there: the
    range from which the other system picks ports. round_trip: seconds. rate_out, rate_back: bits per second.
    """

    here: str
    there: str
    version_there: str
    port_out: int
    port_back: int
    ports_there: str
    out: str
    back: str
    round_trip: float
    rate_out: float
    rate_back: float


class _ProbeConnection:
    """A connection between two doctors. Its methods raise LinkLost if it breaks."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.here, self.there = ends(writer)

    async def send(self, message: Any) -> None:
        try:
            self._writer.write(packed(message))
            async with asyncio.timeout(_ANSWER):
                await self._writer.drain()
        except OSError as error:
            raise LinkLost(reason(error, _ANSWER)) from error

    async def receive(self, seconds: float) -> Any:
        try:
            async with asyncio.timeout(seconds):
                return await heard(self._reader, STRANGERS)
        except (OSError, EOFError, BadFrame) as error:
            raise LinkLost(reason(error, seconds)) from error

    async def burst(self, chunks: int, want: int) -> None:
        """Send so many chunks, and how many are wanted back."""
        for _ in range(chunks):
            await self.send({"fill": _CHUNK})
        await self.send({"want": want})

    async def exchange(self, out: int, back: int) -> None:
        """Send `out` bytes, and wait until `back` bytes have arrived."""
        await self.burst(out // len(_CHUNK), back // len(_CHUNK))
        while await self.receive(_ANSWER) != {"want": 0}:
            pass

    async def close(self) -> None:
        await close(self._writer)


def call(host: str, at: int) -> Findings:
    """Run the checks with the listener at port `at` of `host`. LinkLost with the reason, and what to do if it cannot be
    reached.
    """
    ends_at = time.monotonic() + _LASTING

    def run(coroutine: Any) -> Any:
        try:
            return loop.run(coroutine, max(ends_at - time.monotonic(), 0.0))
        except TimeoutError:
            raise LinkLost(f"it is not done after {_LASTING:g} s") from None

    async def begin() -> _ProbeConnection:
        return _ProbeConnection(*await dial(host, at, PATIENCE))

    try:
        connection = loop.run(begin())
    except OSError as error:
        why = reason(error, PATIENCE)
        mend = {
            "connection refused": f"nothing listens there; start `isles doctor --listen {at}` there",
            "no such host name": "mend the name, or give the address",
        }.get(why, f"the address is wrong, or a firewall drops it; let TCP port {at} in there")
        raise LinkLost(f"{why}: {mend}") from error
    try:
        with EchoServer(connection.here) as echo:
            found = run(_both_ways(connection, echo.port, calls=True))
        rates = measure_link(lambda out, back: run(connection.exchange(out, back)), _LARGEST * len(_CHUNK))
        run(connection.send(rates._asdict()))
        return found(round_trip=rates.round_trip, rate_out=8 * rates.out, rate_back=8 * rates.back)
    finally:
        loop.run(connection.close())


def wait_for_call(listening: socket.socket, seconds: float, on_failure: Callable[[str], None]) -> Findings:
    """Run the checks with the first caller at the socket `listening` that completes them. Several callers are served at
    once, so that a silent one does not keep others out. on_failure: called with failed calls. LinkLost if nobody has
    called within `seconds`.
    """
    ends_at = time.monotonic() + seconds
    found, failures = queue.SimpleQueue[Findings](), queue.SimpleQueue[str]()
    throttle = Throttle(failures.put)

    def refused(address: str, why: str) -> None:
        throttle.tell(f"{address} called, but: {why}")

    with EchoServer(listening.getsockname()[0]) as echo:

        async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = _ProbeConnection(reader, writer)
            found.put(await _answered(connection, echo.port))
            await connection.close()

        with Listener(listening, hear, seconds=_LASTING, refused=refused):
            while time.monotonic() < ends_at:
                with contextlib.suppress(queue.Empty):
                    return found.get(timeout=_GLANCE)
                with contextlib.suppress(queue.Empty):
                    while True:
                        on_failure(failures.get_nowait())
    raise LinkLost(f"no connection within {seconds:g} s")


async def _answered(connection: _ProbeConnection, echo_port: int) -> Findings:
    """Answer the checks of one caller. Raises LinkLost."""
    found = await _both_ways(connection, echo_port, calls=False)
    while isinstance(said := await connection.receive(_ANSWER), dict) and said.keys() & {"fill", "want"}:
        if "want" in said:
            await connection.burst(_checked(_Chunks, said, "want"), 0)
    out, back, round_trip = (_checked(Nonnegative, said, key) for key in ("back", "out", "round_trip"))
    return found(round_trip=round_trip, rate_out=8 * out, rate_back=8 * back)


async def _both_ways(connection: _ProbeConnection, echo_port: int, *, calls: bool) -> Callable[..., Findings]:
    """The findings without the rates. Raises LinkLost."""
    mine = {"doctor": __version__, "port": echo_port, "ports": port_range()}
    if calls:
        await connection.send(mine)
    hello = await connection.receive(PATIENCE)
    version, port, ports = (
        _checked(kind, hello, key) for key, kind in (("doctor", OneLine), ("port", Port), ("ports", OneLine))
    )
    if not calls:
        await connection.send(mine)
    out = await echo_failure(connection.there, port)
    await connection.send({"reached": out})
    back = _checked(OneLine, await connection.receive(2 * PATIENCE), "reached")
    return partial(
        Findings,
        here=connection.here,
        there=connection.there,
        version_there=version,
        port_out=port,
        port_back=echo_port,
        ports_there=ports,
        out=out,
        back=back,
    )


def _checked(kind: Any, message: Any, key: str) -> Any:
    """One field of a message. LinkLost if it is missing or invalid."""
    try:
        return value_of(table(message, "what it says"), key, kind)
    except Unfit:
        raise LinkLost("what answers there is no `isles doctor`") from None
