"""How fast the line between a session and its lighthouse is: an `ECHO` answers at once with as many bytes as asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from isles.comm.elastic.keys import ECHO, PIECE
from isles.comm.elastic.session import Session

_PATIENCE = 5.0  # seconds in which a fresh session gets to know who serves what
_ANSWER = 10.0  # seconds
_AGAIN = 0.05  # seconds between tries
_ENOUGH = 1.0  # seconds, and the rate is known
_SIZES = (1 << 16, 1 << 18, PIECE)  # bytes
_PINGS = 5


@dataclass(frozen=True, kw_only=True)
class EchoLine:
    """up, down: bytes a second to the lighthouse and from it. round_trip: seconds."""

    up: float
    down: float
    round_trip: float


def echo_line(session: Session) -> EchoLine | None:
    """Measured now, within some seconds; None where the lighthouse stops answering meanwhile."""
    trips = [_timed(session, b"", 0) for _ in range(_PINGS)]
    up = _rate(session, lambda size: (bytes(size), 0))
    down = _rate(session, lambda size: (b"", size))
    if None in trips or not up or not down:
        return None
    return EchoLine(up=up, down=down, round_trip=min(trip for trip in trips if trip is not None))


def ask(session: Session, key: str, said: bytes, seconds: float = _ANSWER) -> bytes | None:
    """The lighthouse's answer; None where it refuses or says nothing.

    Asked again for a moment, because a fresh session does not know yet who serves what.
    """
    until = time.monotonic() + _PATIENCE
    while True:
        reply, refusal = session.answer(key, said, seconds=seconds)
        if reply is not None or refusal is not None or time.monotonic() > until:
            return reply
        time.sleep(_AGAIN)


def _rate(session: Session, size_of: Callable[[int], tuple[bytes, int]]) -> float:
    """Bytes a second of pieces that grow until they take a while; 0 where an answer did not come."""
    rate = 0.0
    for size in (*_SIZES, PIECE, PIECE, PIECE):
        took = _timed(session, *size_of(size))
        if took is None:
            return 0.0
        rate = max(rate, size / took)
        if took > _ENOUGH:
            return size / took
    return rate


def _timed(session: Session, said: bytes, wanted: int) -> float | None:
    """Seconds until the answer of so many bytes is here; None where it did not come."""
    began = time.monotonic()
    answer = ask(session, ECHO, wanted.to_bytes(4, "big") + said)
    took = time.monotonic() - began
    return took if answer is not None and len(answer) == wanted else None
