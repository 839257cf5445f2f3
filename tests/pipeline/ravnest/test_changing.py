"""Nodes of clusters that are killed at any message, leave and come: what is averaged is by the numbers the mean of the
clusters that are whole, and the same everywhere.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

import isles
from tests.pipeline.ravnest.changing import FOUNDERS, Averaged, MessageAccounting, change, expected, start
from tests.pipeline.swarm import killing

LINKS = isles.Links(bandwidth=1e8, latency=0.01, jitter=0.8)


@pytest.mark.parametrize(
    ("seed", "rounds"),
    [(9, 30), *(pytest.param(seed, 60, marks=pytest.mark.long) for seed in (0, *range(9, 50)))],
)
def test_many_rounds_under_kills_leaves_and_joins(seed: int, rounds: int) -> None:
    """Cluster 2 is one node that stays, so that there is always somebody to go on from."""
    draw, workers, stays, share = random.Random(seed), 12, 5, rounds / 60
    comers = range(FOUNDERS, workers)
    accounting = MessageAccounting(
        rounds,
        comes={rank: share * draw.uniform(1.0, 40.0) for rank in comers},
        leaves={rank: int(share * draw.randrange(50)) for rank in draw.sample([0, 3, *comers], 3)},
    )
    mortal = [rank for rank in range(workers) if rank != stays and rank not in accounting.leaves]
    deaths = {rank: int(share * draw.randint(1, 4000)) + 1 for rank in draw.sample(mortal, 5)}
    done = killing.run(change, workers, (accounting,), deaths, links=LINKS, step_seconds=0.0)
    told = {rank: one[0] for rank, one in enumerate(done) if one is not None}
    assert [*told[stays]] == [*range(rounds)]

    want, whole = start(), list[list[int]]()
    for number in range(rounds):
        there: dict[int, Averaged] = {rank: own[number] for rank, own in told.items() if number in own}
        assignment, clusters = there[stays].assignment, there[stays].whole
        assert all((one.assignment, one.whole) == (assignment, clusters) for one in there.values()), number
        assert all(assignment.lost.isdisjoint(assignment.clusters[cluster]) for cluster in clusters)
        want = expected(want, number, clusters)
        for one in there.values():
            for name, held in one.held.items():
                assert (held.double() - want[name]).abs().max() <= 2e-5, (number, name)
        whole.append(clusters)
    assert any(len(after) < len(before) for before, after in pairwise(whole))
    assert any(len(after) > len(before) for before, after in pairwise(whole))
