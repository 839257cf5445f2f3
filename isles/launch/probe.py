"""What `isles doctor` and `--links probe:HOST:PORT` of `isles plan` ask another machine: whether each direction is
open, the round trip and the rates.

caller (--peer, --links probe:)                          host (--listen)
{"doctor": version, "port": echo port}         ------>
                                               <------   {"doctor": version, "port": echo port, "ports": range}
asks for an echo, sends {"reached": reason}    <----->   asks for an echo, sends {"reached": reason}
pings                                          <----->   answers
bursts, then absorbs                           <----->   absorbs, then bursts
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from isles.comm.sockets.frames import STRANGERS, heard
from isles.comm.sockets.listener import Listener, Throttle
from isles.comm.sockets.lost import LinkLost
from isles.fields import Nonnegative, OneLine, Port, Unfit, table, value_of
from isles.launch.link import Link, connect
from isles.launch.reachable import PATIENCE, EchoServer, echo_failure, port_range
from isles.version import __version__

_PINGS = 20
_CHUNK = "x" * (1 << 15)  # 32 kB: a message of a stranger's may be twice as long
_ENOUGH = 0.4  # seconds that a burst must take to be a measurement
_LARGEST = 1 << 11  # chunks of a burst
_ANSWER = 60.0  # seconds: a burst of one chunk at 10 kbit/s
_LASTING = 300.0  # seconds that all checks with one caller may take
_CALLERS = 4  # at a time
_GLANCE = 0.05  # seconds between looks at who is done


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What one side found out about the other.

    out, back: empty where that direction is open, else why not. port_out, port_back: the ports tried. ports_there: the
    range from which the other side's system picks. round_trip: seconds. rate_out, rate_back: bits per second.
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


def call(host: str, at: int) -> Findings:
    """The checks with whoever listens at port `at` of `host`. LinkLost with the reason, and the mend where it cannot be
    reached.
    """
    try:
        link = connect(host, at, PATIENCE)
    except LinkLost as error:
        mend = {
            "connection refused": f"nothing listens there; start `isles doctor --listen {at}` there",
            "no such host name": "mend the name, or give the address",
        }.get(str(error), f"the address is wrong, or a firewall drops it; let TCP port {at} in there")
        raise LinkLost(f"{error}: {mend}") from error
    try:
        return probe(link)
    finally:
        link.close()


def wait_for_call(listening: socket.socket, seconds: float, on_failure: Callable[[str], None]) -> Findings:
    """The checks with the first that calls at the socket `listening` and goes through them to the end; several may be
    at it at a time, so that nobody keeps others out by calling and saying nothing more. on_failure: is told of calls
    that led to nothing. LinkLost where nobody called within `seconds`.
    """
    ends_at = time.monotonic() + seconds
    callers: queue.Queue[tuple[Link, Any]] = queue.Queue(_CALLERS)
    failures: queue.SimpleQueue[str] = queue.SimpleQueue()
    throttle = Throttle(failures.put)

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await heard(reader, STRANGERS)
        _said(hello)
        if callers.full():
            raise LinkLost("too many call at once")
        callers.put_nowait((Link(reader, writer, STRANGERS), hello))

    def refused(address: str, why: str) -> None:
        throttle.tell(f"{address} called, but: {why}")

    with Listener(listening, hear, seconds=PATIENCE, refused=refused), ThreadPoolExecutor(_CALLERS) as pool:
        under_way: dict[Future[Findings], Link] = {}
        try:
            while time.monotonic() < ends_at:
                if len(under_way) == _CALLERS:
                    wait(under_way, _GLANCE, FIRST_COMPLETED)
                else:
                    with contextlib.suppress(queue.Empty):
                        link, hello = callers.get(timeout=_GLANCE)
                        under_way[pool.submit(probe, link, hello)] = link
                for future, link in list(under_way.items()):
                    if not future.done():
                        continue
                    del under_way[future]
                    link.close()
                    try:
                        return future.result()
                    except LinkLost as error:
                        refused(link.there, str(error))
                with contextlib.suppress(queue.Empty):
                    while True:
                        on_failure(failures.get_nowait())
        finally:
            with contextlib.suppress(queue.Empty):
                while True:
                    callers.get_nowait()[0].close()
            for link in under_way.values():
                link.end()
    raise LinkLost(f"nobody called within {seconds:g} s")


def probe(link: Link, hello: Any = None) -> Findings:
    """Go through the checks with the other side of `link`. hello: what the other side said first; None on the side that
    calls. LinkLost where it breaks, or is not done after some minutes.
    """
    calls, ends_at = hello is None, time.monotonic() + _LASTING
    with EchoServer(link.here) as echo:
        mine = {"doctor": __version__, "port": echo.port, "ports": port_range()}
        if calls:
            link.send(mine)
            hello = link.receive(PATIENCE)
        version, port_out, ports = _said(hello)
        if not calls:
            link.send(mine)
        out = echo_failure(link.there, port_out, PATIENCE)
        link.send({"reached": out})
        back = _checked(OneLine, link.receive(2 * PATIENCE), "reached")
    if calls:
        round_trip, rate_out = _ping(link), _burst(link, ends_at)
        link.send({"round_trip": round_trip, "rate": rate_out})
        rate_back = _checked(Nonnegative, _absorb(link, ends_at), "rate")
    else:
        told = _absorb(link, ends_at)
        round_trip, rate_back = (_checked(Nonnegative, told, key) for key in ("round_trip", "rate"))
        rate_out = _burst(link, ends_at)
        link.send({"rate": rate_out})
    return Findings(
        here=link.here,
        there=link.there,
        version_there=version,
        port_out=port_out,
        port_back=echo.port,
        ports_there=ports,
        out=out,
        back=back,
        round_trip=round_trip,
        rate_out=rate_out,
        rate_back=rate_back,
    )


def _said(hello: Any) -> tuple[str, int, str]:
    """Version, port of the echo server, and range of ports of the side that said it."""
    return _checked(OneLine, hello, "doctor"), _checked(Port, hello, "port"), _checked(OneLine, hello, "ports")


def _ping(link: Link) -> float:
    """Median seconds there and back."""
    times = []
    for ping in range(_PINGS):
        start = time.perf_counter()
        link.send({"ping": ping})
        link.receive(PATIENCE)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _burst(link: Link, ends_at: float) -> float:
    """Bits per second: bursts that double until one takes long enough to tell."""
    chunks = 1
    while time.monotonic() < ends_at:
        start = time.perf_counter()
        for _ in range(chunks):
            link.send({"fill": _CHUNK})
        link.send({"ping": chunks})
        link.receive(_ANSWER)
        seconds = time.perf_counter() - start
        if seconds >= _ENOUGH or chunks >= _LARGEST:
            return 8 * len(_CHUNK) * chunks / seconds
        chunks *= 2
    raise LinkLost(f"it is not done after {_LASTING:g} s")


def _absorb(link: Link, ends_at: float) -> Any:
    """Answer pings and swallow bursts until something else comes, which is returned."""
    while time.monotonic() < ends_at:
        message = link.receive(_ANSWER)
        if not isinstance(message, dict) or not message.keys() & {"ping", "fill"}:
            return message
        if "ping" in message:
            link.send({"ping": message["ping"]})
    raise LinkLost(f"it is not done after {_LASTING:g} s")


def _checked(kind: Any, message: Any, key: str) -> Any:
    """One field of a message. LinkLost where the other side says something else."""
    try:
        return value_of(table(message, "what it says"), key, kind)
    except Unfit:
        raise LinkLost("what answers there is no `isles doctor`") from None
