"""The rate at which workers compute as much of the time as is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable

_FASTEST = 1e-9


def wanted_rate(share: Callable[[float], float], target: float) -> float:
    """The factor on all rates at which the target is just reached, to 0.3 %; nan: none is enough.

    Waiting grows with the seconds a bit takes, in straight pieces: a regula falsi (Illinois) finds it in a few steps.
    """

    def over(slowness: float) -> float:
        return 1 / share(1 / slowness) - 1 / target

    low, high = _FASTEST, 1.0
    below = over(low)
    if below > 0:
        return math.nan
    above = over(high)
    while above <= 0:
        if high > 1 / _FASTEST:
            return 0.0
        low, below, high = high, above, 8 * high
        above = over(high)
    while high > low * 1.003:
        middle = low + (high - low) * -below / (above - below)
        middle = min(max(middle, low + 1e-4 * (high - low)), high - 1e-4 * (high - low))
        at = over(middle)
        if at > 0:
            high, above, below = middle, at, below / 2
        else:
            low, below, above = middle, at, above / 2
    return 1 / low
