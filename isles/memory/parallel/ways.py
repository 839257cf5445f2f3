"""All ways on one job."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from isles.memory.parallel.cut import hybrid
from isles.memory.parallel.job import ParallelJob, ParallelWay
from isles.memory.parallel.uncut import fully_sharded, out_of_core


def compared(job: ParallelJob) -> list[ParallelWay]:
    """Each at its fastest; those that fit first, the fastest first."""
    found = [
        out_of_core(job, shared=False),
        out_of_core(job, shared=True),
        fully_sharded(job),
        hybrid(job, tensor=False),
    ]
    found += [hybrid(job, tensor=True)] if job.per_host > 1 else []
    return sorted(found, key=lambda way: (way.step is None, way.step or 0.0))


def turning(
    first: Callable[[float], float | None], second: Callable[[float], float | None], at: Sequence[float]
) -> float | None:
    """Where `first` becomes faster than `second`, at rates that rise: read off between two of them on a logarithmic
    scale; the first rate where it is so from there on; infinite where it never is; None where one does not fit.
    """
    gaps = []
    for rate in at:
        one, other = first(rate), second(rate)
        if one is None or other is None:
            return None
        gaps.append(math.log(one / other))
    for (low, before), (high, after) in itertools.pairwise(zip(at, gaps, strict=True)):
        if before > 0 >= after:
            return math.exp(math.log(low) + before / (before - after) * math.log(high / low))
    return at[0] if gaps[0] <= 0 else math.inf
