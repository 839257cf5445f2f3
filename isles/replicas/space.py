"""What of a method's settings is worth a search, in coordinates in which it is easy.

outer step      outer_lr / (1 - outer_momentum), where a constant outer gradient takes the anchor a round: what is
                good of it hardly depends on the momentum
outer_momentum  0 to 0.9
sync_every      where time counts; at equal tokens or steps fewer inner steps a round are the better, and cost nothing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STEP, MOMENTUM = "replicas.outer_lr / (1 - outer_momentum)", "replicas.outer_momentum"
_RATE, _EVERY = "replicas.outer_lr", "replicas.sync_every"
_WIDE, _LOW, _HIGH = 5.0, 0.2, 3.0


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
    def around(cls, name: str, start: float, factor: float, **more: Any) -> Dimension:
        """Between start / factor and start x factor."""
        return cls(name=name, start=start, low=start / factor, high=start * factor, **more)


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
    every = getattr(config, "sync_every", None)
    if timed and every is not None:
        most = max(min(4 * every, steps // 4), every)
        found.append(Dimension(name=_EVERY, start=every, low=max(every // 4, 1), high=most, whole=True))
    return found


def settings_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"section.key": value} of a point in such a space; four digits, which can be typed."""
    found = {key: value for key, value in values.items() if key != STEP}
    if STEP in values:
        found[_RATE] = values[STEP] * (1 - values[MOMENTUM])
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in found.items()}
