"""What `isles doctor` and `isles plan --probe` ask another machine: is each direction open, how long is the way, how
wide.

caller (--peer, --probe)                           host (--listen)
{"doctor": version, "port": door}        ------>
                                         <------   {"doctor": version, "port": door, "ports": range}
knocks there, sends {"knocked": reason}  <----->   knocks here, sends {"knocked": reason}
pings                                    <----->   answers
bursts, then absorbs                     <----->   absorbs, then bursts
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from isles.launch.link import Line, LineLost, connect
from isles.launch.reachable import PATIENCE, Door, knock, port_range
from isles.version import __version__

_PINGS = 20
_CHUNK = "x" * (1 << 16)  # 64 kB
_ENOUGH = 0.4  # seconds that a burst must take to be a measurement
_LARGEST = 1 << 10  # chunks of a burst
_ANSWER = 60.0  # seconds: a burst of one chunk at 10 kbit/s


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What one side found out about the way to the other.

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
    """The checks with whoever listens there. LineLost with the reason, and the mend where it cannot be reached."""
    try:
        line = connect(host, port, PATIENCE)
    except LineLost as error:
        mend = {
            "connection refused": f"nothing listens there; start `isles doctor --listen {port}` there",
            "no such host name": "mend the name, or give the address",
        }.get(str(error), f"the address is wrong, or a firewall drops it; let TCP port {port} in there")
        raise LineLost(f"{error}: {mend}") from error
    try:
        return examine(line, calls=True)
    finally:
        line.close()


def wait_for_call(door: socket.socket, seconds: float, on_failure: Callable[[str], None]) -> Findings:
    """The checks with the first that calls at the listening socket `door`. on_failure: is told of calls that led to
    nothing. LineLost where nobody called within `seconds`.
    """
    ends_at = time.monotonic() + seconds
    while (left := ends_at - time.monotonic()) > 0:
        door.settimeout(left)
        try:
            line = Line(door.accept()[0])
        except TimeoutError:
            break
        try:
            return examine(line, calls=False)
        except LineLost as error:
            on_failure(f"{line.there} called, but: {error}")
        finally:
            line.close()
    raise LineLost(f"nobody called within {seconds:g} s")


def examine(line: Line, *, calls: bool) -> Findings:
    """Go through the checks with the other side of `line`; exactly one side `calls`. LineLost where it breaks."""
    with Door(line.here) as door:
        hello = {"doctor": __version__, "port": door.port, "ports": port_range()}
        if calls:
            line.send(hello)
        theirs = _field(line.receive(PATIENCE), "doctor", str)
        if not calls:
            line.send(hello)
        port = _field(theirs, "port", int)["port"]
        out = knock(line.there, port, PATIENCE)
        line.send({"knocked": out})
        back = _field(line.receive(2 * PATIENCE), "knocked", str)["knocked"]
    if calls:
        round_trip, rate_out = _ping(line), _burst(line)
        line.send({"round_trip": round_trip, "rate": rate_out})
        rate_back = _field(_absorb(line), "rate", float)["rate"]
    else:
        told = _absorb(line)
        round_trip, rate_back = (_field(told, key, float)[key] for key in ("round_trip", "rate"))
        rate_out = _burst(line)
        line.send({"rate": rate_out})
    return Findings(
        here=line.here,
        there=line.there,
        version_there=str(theirs["doctor"]),
        port_out=port,
        port_back=door.port,
        ports_there=str(theirs.get("ports", "")),
        out=out,
        back=back,
        round_trip=round_trip,
        rate_out=rate_out,
        rate_back=rate_back,
    )


def _ping(line: Line) -> float:
    """Median seconds there and back."""
    times = []
    for number in range(_PINGS):
        start = time.perf_counter()
        line.send({"ping": number})
        line.receive(PATIENCE)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _burst(line: Line) -> float:
    """Bits per second: bursts that double until one takes long enough to tell."""
    chunks = 1
    while True:
        start = time.perf_counter()
        for _ in range(chunks):
            line.send({"fill": _CHUNK})
        line.send({"ping": chunks})
        line.receive(_ANSWER)
        seconds = time.perf_counter() - start
        if seconds >= _ENOUGH or chunks >= _LARGEST:
            return 8 * len(_CHUNK) * chunks / seconds
        chunks *= 2


def _absorb(line: Line) -> Any:
    """Answer pings and swallow bursts until something else comes, which is returned."""
    while True:
        message = line.receive(_ANSWER)
        if not isinstance(message, dict) or not message.keys() & {"ping", "fill"}:
            return message
        if "ping" in message:
            line.send(message)


def _field(message: Any, key: str, kind: type) -> dict[str, Any]:
    """The message, once it is known to be one with that key. LineLost where the other side says something else."""
    if not isinstance(message, dict) or not isinstance(message.get(key), kind):
        raise LineLost("what answers there is no `isles doctor` or `isles plan`")
    return message
