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
    first: Callable[[float], float | None], second: Callable[[float], float | None], rates: Sequence[float]
) -> float | None:
    """The rate of a link from which on `first` is no slower than `second`. first, second: seconds of a step of two
    ways at a rate, None where a way does not fit.

    Both are asked at `rates`, which rise. Where `first` is slower at one of them and not at the next, the answer lies
    between the two, by a straight line of log(first / second) over log(rate). `first` was never slower: the lowest
    rate. It is slower at all of them: infinite. One of the ways does not fit: None.
    """
    gaps = []
    for rate in rates:
        one, other = first(rate), second(rate)
        if one is None or other is None:
            return None
        gaps.append(math.log(one / other))
    for (low, before), (high, after) in itertools.pairwise(zip(rates, gaps, strict=True)):
        if before > 0 >= after:
            return math.exp(math.log(low) + before / (before - after) * math.log(high / low))
    return rates[0] if gaps[0] <= 0 else math.inf
