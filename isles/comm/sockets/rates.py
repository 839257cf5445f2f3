"""How fast a line is: questions and answers that grow until one takes a while."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

_PINGS = 20
_SMALLEST = 1 << 16  # bytes
_ENOUGH = 0.4  # seconds that a question must take to be a measurement


class LineRates(NamedTuple):
    """out, back: bytes a second to the other side and from it. round_trip: median seconds."""

    out: float
    back: float
    round_trip: float


def line_rates(ask: Callable[[int, int], object], largest: int) -> LineRates:
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
    return LineRates(rate(lambda size: timed(size, 0)), rate(lambda size: timed(0, size)), round_trip)
