"""What of a method's settings is worth a search, in coordinates in which it is easy.

outer step      outer_lr / (1 - outer_momentum), where a constant outer gradient takes the anchor a round: what is
                good of it hardly depends on the momentum
outer_momentum  0 to 0.9
1 - KEY         of a share near 1, on a logarithmic scale: 0.9 is as far from 0.99 as that from 0.999
sync_every      where time counts, as all that only says how much is sent: at equal tokens or steps more costs nothing
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STEP, MOMENTUM = "replicas.outer_lr / (1 - outer_momentum)", "replicas.outer_momentum"
_RATE, _EVERY = "replicas.outer_lr", "replicas.sync_every"
_WIDE, _LOW, _HIGH, _LEFT = 5.0, 0.2, 3.0, "1 - "


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """A setting, or a coordinate of several: between low and high, on a logarithmic scale if log, in whole numbers if
    whole; or one of choices. start: what the configuration itself has, which is tried first.
    """

    name: str
    start: Any
    low: float = 0.0
    high: float = 0.0
    log: bool = True
    whole: bool = False
    choices: Sequence[Any] = ()

    @classmethod
    def around(cls, name: str, start: float, factor: float, most: float = math.inf, whole: bool = False) -> Dimension:
        """Between start / factor and start x factor, or `most`."""
        low = max(start // factor, 1) if whole else start / factor
        return cls(name=name, start=start, low=low, high=max(min(start * factor, most), start), whole=whole)

    @classmethod
    def below_1(cls, key: str, start: float, factor: float) -> Dimension:
        """What a share leaves of 1."""
        return cls.around(f"{_LEFT}{key}", 1 - start, factor, most=1.0)


def usual_space(config: Any, steps: int, *, timed: bool) -> list[Dimension]:
    """That of a method with an outer rate, an outer momentum, a number of inner steps a round, or some of them. steps:
    of the run. timed: whether what is searched for is the best at equal time.
    """
    found = []
    rate, momentum = getattr(config, "outer_lr", None), getattr(config, "outer_momentum", None)
    if rate is not None and momentum is not None:
        start = rate / (1 - momentum)
        low, high = min(_LOW, start / 2), max(_HIGH, start * 2)
        found.append(Dimension(name=STEP, start=start, low=low, high=high))
        found.append(Dimension(name=MOMENTUM, start=momentum, low=0.0, high=max(0.9, momentum), log=False))
    elif rate is not None:
        found.append(Dimension.around(_RATE, rate, _WIDE))
    if timed and getattr(config, "sync_every", None) is not None:
        found.append(rounds(config, steps))
    return found


def rounds(config: Any, steps: int) -> Dimension:
    """Inner steps a round: four of them in the run, at least."""
    return Dimension.around(_EVERY, config.sync_every, 4, most=steps // 4, whole=True)


def settings_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"section.key": value} of a point in such a space; four digits, which can be typed."""
    found = {key: value for key, value in values.items() if key != STEP}
    if STEP in values:
        found[_RATE] = values[STEP] * (1 - values[MOMENTUM])
    found = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in found.items()}
    return {key.removeprefix(_LEFT): round(1 - x, 12) if _LEFT in key else x for key, x in found.items()}
