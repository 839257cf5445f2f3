"""What `isles doctor` and `isles plan --probe` ask another machine: whether each direction is open, the round trip and
the rates.

caller (--peer, --probe)                                 host (--listen)
{"doctor": version, "port": echo port}         ------>
                                               <------   {"doctor": version, "port": echo port, "ports": range}
asks for an echo, sends {"reached": reason}    <----->   asks for an echo, sends {"reached": reason}
pings                                          <----->   answers
bursts, then absorbs                           <----->   absorbs, then bursts
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from isles.launch.link import Link, LinkLost, connect
from isles.launch.reachable import PATIENCE, EchoServer, echo_failure, port_range
from isles.version import __version__

_PINGS = 20
_CHUNK = "x" * (1 << 16)  # 64 kB
_ENOUGH = 0.4  # seconds that a burst must take to be a measurement
_LARGEST = 1 << 10  # chunks of a burst
_ANSWER = 60.0  # seconds: a burst of one chunk at 10 kbit/s


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


def call(host: str, port: int) -> Findings:
    """The checks with whoever listens there. LinkLost with the reason, and the mend where it cannot be reached."""
    try:
        link = connect(host, port, PATIENCE)
    except LinkLost as error:
        mend = {
            "connection refused": f"nothing listens there; start `isles doctor --listen {port}` there",
            "no such host name": "mend the name, or give the address",
        }.get(str(error), f"the address is wrong, or a firewall drops it; let TCP port {port} in there")
        raise LinkLost(f"{error}: {mend}") from error
    try:
        return probe(link, calls=True)
    finally:
        link.close()


def wait_for_call(listener: socket.socket, seconds: float, on_failure: Callable[[str], None]) -> Findings:
    """The checks with the first that calls at the socket `listener`. on_failure: is told of calls that led to
    nothing. LinkLost where nobody called within `seconds`.
    """
    ends_at = time.monotonic() + seconds
    while (left := ends_at - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            link = Link(listener.accept()[0])
        except TimeoutError:
            break
        try:
            return probe(link, calls=False)
        except LinkLost as error:
            on_failure(f"{link.there} called, but: {error}")
        finally:
            link.close()
    raise LinkLost(f"nobody called within {seconds:g} s")


def probe(link: Link, *, calls: bool) -> Findings:
    """Go through the checks with the other side of `link`; exactly one side `calls`. LinkLost where it breaks."""
    with EchoServer(link.here) as echo:
        hello = {"doctor": __version__, "port": echo.port, "ports": port_range()}
        if calls:
            link.send(hello)
        theirs = _field(link.receive(PATIENCE), "doctor", str)
        if not calls:
            link.send(hello)
        port = _field(theirs, "port", int)["port"]
        out = echo_failure(link.there, port, PATIENCE)
        link.send({"reached": out})
        back = _field(link.receive(2 * PATIENCE), "reached", str)["reached"]
    if calls:
        round_trip, rate_out = _ping(link), _burst(link)
        link.send({"round_trip": round_trip, "rate": rate_out})
        rate_back = _field(_absorb(link), "rate", float)["rate"]
    else:
        told = _absorb(link)
        round_trip, rate_back = (_field(told, key, float)[key] for key in ("round_trip", "rate"))
        rate_out = _burst(link)
        link.send({"rate": rate_out})
    return Findings(
        here=link.here,
        there=link.there,
        version_there=str(theirs["doctor"]),
        port_out=port,
        port_back=echo.port,
        ports_there=str(theirs.get("ports", "")),
        out=out,
        back=back,
        round_trip=round_trip,
        rate_out=rate_out,
        rate_back=rate_back,
    )


def _ping(link: Link) -> float:
    """Median seconds there and back."""
    times = []
    for number in range(_PINGS):
        start = time.perf_counter()
        link.send({"ping": number})
        link.receive(PATIENCE)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _burst(link: Link) -> float:
    """Bits per second: bursts that double until one takes long enough to tell."""
    chunks = 1
    while True:
        start = time.perf_counter()
        for _ in range(chunks):
            link.send({"fill": _CHUNK})
        link.send({"ping": chunks})
        link.receive(_ANSWER)
        seconds = time.perf_counter() - start
        if seconds >= _ENOUGH or chunks >= _LARGEST:
            return 8 * len(_CHUNK) * chunks / seconds
        chunks *= 2


def _absorb(link: Link) -> Any:
    """Answer pings and swallow bursts until something else comes, which is returned."""
    while True:
        message = link.receive(_ANSWER)
        if not isinstance(message, dict) or not message.keys() & {"ping", "fill"}:
            return message
        if "ping" in message:
            link.send(message)


def _field(message: Any, key: str, kind: type) -> dict[str, Any]:
    """The message, once it is known to be one with that key. LinkLost where the other side says something else."""
    if not isinstance(message, dict) or not isinstance(message.get(key), kind):
        raise LinkLost("what answers there is no `isles doctor` or `isles plan`")
    return message
