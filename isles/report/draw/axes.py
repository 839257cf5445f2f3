"""Round ticks for axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChartAxis:
    """Ticks and the two ends of an axis; `at` gives a value's place on it, 0 to 1."""

    ticks: Sequence[float]
    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(value), math.log10(low), math.log10(high)
        return (value - low) / (high - low)


def linear(low: float, high: float, count: int, *, tight: bool = False, whole: bool = False) -> ChartAxis:
    """About `count` round ticks over [low, high]. tight: the axis ends where the data do, else at the outer ticks;
    whole: no tick between two whole numbers.
    """
    if high <= low:
        low, high = (low, low + 1) if tight or low == 0 else (low - abs(low) * 0.05, low + abs(low) * 0.05)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    # The small shifts keep a rounding error from adding or losing a tick.
    first = math.ceil(low / step - 1e-9) if tight else math.floor(low / step + 1e-9)
    last = math.floor(high / step + 1e-9) if tight else math.ceil(high / step - 1e-9)
    digits = max(0, 3 - math.floor(math.log10(step)))  # 3 * 0.1 is a little more than 0.3
    ticks = [round(k * step, digits) for k in range(first, last + 1)]
    return ChartAxis(ticks, low if tight else ticks[0], high if tight else ticks[-1])


def logarithmic(low: float, high: float, *, tight: bool = False) -> ChartAxis:
    """Powers of ten around [low, high], at most seven of them ticks; tight as in `linear`."""
    bottom, top = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    top = max(top, bottom + 1)
    stride = math.ceil((top - bottom) / 7)
    ticks = [10.0**k for k in range(bottom, top + 1, stride)]
    if not tight or high <= low:
        return ChartAxis(ticks, 10.0**bottom, 10.0**top, log=True)
    inside = [tick for tick in ticks if low <= tick <= high]
    if len(inside) < 2:  # less than two powers of ten: 1, 2 and 5 of each are round enough
        inside = [m * 10.0**k for k in range(bottom, top + 1) for m in (1, 2, 5) if low <= m * 10.0**k <= high]
    return ChartAxis(inside, low, high, log=True)
