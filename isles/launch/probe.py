"""What `isles doctor` and `--links probe:HOST:PORT` of `isles plan` ask another machine: whether each direction is
open, the round trip and the rates.

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
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from isles.comm.sockets.frames import STRANGERS, heard
from isles.comm.sockets.listener import Listener, Throttle
from isles.comm.sockets.lost import LinkLost
from isles.comm.sockets.rates import LineRates, line_rates
from isles.comm.sockets.reachable import PATIENCE, EchoServer, echo_failure, port_range
from isles.fields import Int, Nonnegative, OneLine, Port, Unfit, table, value_of
from isles.launch.link import Link, connect
from isles.version import __version__

_CHUNK = "x" * (1 << 15)  # 32 kB: a message of a stranger's may be twice as long
_LARGEST = 1 << 11  # chunks of a burst
_Chunks = Annotated[Int, Field(ge=0, le=_LARGEST)]
_ANSWER = 60.0  # seconds: a burst of two chunks at 10 kbit/s
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
        out = echo_failure(link.there, port_out)
        link.send({"reached": out})
        back = _checked(OneLine, link.receive(2 * PATIENCE), "reached")
    if calls:
        rates = line_rates(lambda out, back: _exchange(link, out, back, ends_at), _LARGEST * len(_CHUNK))
        link.send(rates._asdict())
    else:
        told = _answer(link, ends_at)
        rates = LineRates(*(_checked(Nonnegative, told, key) for key in ("back", "out", "round_trip")))
    return Findings(
        here=link.here,
        there=link.there,
        version_there=version,
        port_out=port_out,
        port_back=echo.port,
        ports_there=ports,
        out=out,
        back=back,
        round_trip=rates.round_trip,
        rate_out=8 * rates.out,
        rate_back=8 * rates.back,
    )


def _said(hello: Any) -> tuple[str, int, str]:
    """Version, port of the echo server, and range of ports of the side that said it."""
    return _checked(OneLine, hello, "doctor"), _checked(Port, hello, "port"), _checked(OneLine, hello, "ports")


def _exchange(link: Link, out: int, back: int, ends_at: float) -> None:
    """Say so many bytes, and wait until as many as `back` have come."""
    _say(link, out // len(_CHUNK), back // len(_CHUNK))
    while link.receive(_ANSWER) != {"want": 0}:
        if time.monotonic() > ends_at:
            raise LinkLost(f"it is not done after {_LASTING:g} s")


def _say(link: Link, chunks: int, want: int) -> None:
    for _ in range(chunks):
        link.send({"fill": _CHUNK})
    link.send({"want": want})


def _answer(link: Link, ends_at: float) -> Any:
    """Say as much as is wanted, until something else comes, which is returned."""
    while time.monotonic() < ends_at:
        message = link.receive(_ANSWER)
        if not isinstance(message, dict) or not message.keys() & {"want", "fill"}:
            return message
        if "want" in message:
            _say(link, _checked(_Chunks, message, "want"), 0)
    raise LinkLost(f"it is not done after {_LASTING:g} s")


def _checked(kind: Any, message: Any, key: str) -> Any:
    """One field of a message. LinkLost where the other side says something else."""
    try:
        return value_of(table(message, "what it says"), key, kind)
    except Unfit:
        raise LinkLost("what answers there is no `isles doctor`") from None
