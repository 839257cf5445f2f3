"""Made-up problems for the tests of the planner, and the reference instances where they are at hand."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from benchmarks._reference import REFERENCE, instance
from isles.network.routing.problem import RoutingCosts, RoutingProblem


def drawn(seed, sizes=(2, 2, 2), *, path_length=3, memory=2, waves=2, slowest=1.0, costs=None):
    """Random symmetric delays and speeds."""
    rng, count = random.Random(seed), sum(sizes)
    delays = [[0.0] * count for _ in range(count)]
    for u in range(count):
        for v in range(u):
            delays[u][v] = delays[v][u] = round(rng.uniform(0.05, 1.5), 3)
    cuts = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    return RoutingProblem(
        stages=tuple(tuple(range(low, high)) for low, high in itertools.pairwise(cuts)),
        delays=tuple(map(tuple, delays)),
        forward=tuple(round(rng.uniform(0.2, slowest), 3) for _ in range(count)),
        path_length=path_length,
        memory=memory,
        waves=waves,
        costs=costs or RoutingCosts(),
    )


def reference(name):
    """(problem, the instance's table) of the authors' data."""
    found = instance(name)
    if found is None:
        pytest.skip(f"no reference instances: {REFERENCE} is not beside the repository")
    return found


def held_by(played):
    """Most forwards that each worker kept for their backward at once.

    A forward counts from its start to the end of its backward; what ends at a moment is gone before others start.
    """
    moments = [(span.start, 1, span.worker) for span in played.spans if span.task.kind == "F"]
    moments += [(span.end, -1, span.worker) for span in played.spans if span.task.kind == "B"]
    now, most = Counter(), dict.fromkeys(sorted({span.worker for span in played.spans}), 0)
    for _, change, worker in sorted(moments):
        now[worker] += change
        most[worker] = max(most[worker], now[worker])
    return most
