"""The rate at which workers compute as much of the time as is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable

_FASTEST, _NEAR = 1e-9, 0.003


def wanted_rate(share: Callable[[float], float], target: float) -> float:
    """The factor on all rates at which the target is just reached, to 0.3 %; nan: none is enough.

    Waiting grows with the seconds a bit takes, in straight pieces, and what can be hidden behind computing comes first,
    so no piece is flatter than the line from no waiting for bits at all: a regula falsi (Illinois) ends in a few steps.
    """

    def over(slowness: float) -> float:
        return 1 / share(1 / slowness) - 1 / target

    low, high = _FASTEST, 1.0
    below = over(low)
    if below > 0:
        return math.nan
    near, above, side = -below * _NEAR, over(high), 0
    while above <= 0:
        if high > 1 / _FASTEST:
            return 0.0
        low, below, high = high, above, 64 * high
        above = over(high)
    while high > low * (1 + _NEAR):
        middle = low + (high - low) * -below / (above - below)
        middle = min(max(middle, low + 1e-4 * (high - low)), high - 1e-4 * (high - low))
        at = over(middle)
        if abs(at) <= near:
            return 1 / middle
        if at > 0:
            high, above, below, side = middle, at, below / (2 if side == 1 else 1), 1
        else:
            low, below, above, side = middle, at, above / (2 if side == -1 else 1), -1
    return 1 / low
