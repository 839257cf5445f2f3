"""Inner steps a round from how fast each worker is, so that rounds take all of them about as long."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

_ALIKE = 0.8  # of the usual pace, from which on a worker takes as many steps as all


def steps_by_pace(seconds: Sequence[float], most: int) -> tuple[int, ...]:
    """Inner steps a round of each worker, `most` for whoever is about as fast as the median or faster.

    seconds: of one inner step of each worker, 0 where unknown. Nobody gets less than an eighth of `most`.
    """
    known = [one for one in seconds if one > 0]
    usual = median(known) if known else 0.0
    paces = (usual / one if one > 0 else 1.0 for one in seconds)
    return tuple(most if pace > _ALIKE else max(int(most * pace), -(-most // 8)) for pace in paces)
