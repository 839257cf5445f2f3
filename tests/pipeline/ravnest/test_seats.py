"""Who serves what, over seeded losses: nobody twice, nobody lost where it counts, and nobody called in vain."""

from __future__ import annotations

import random

import pytest

from isles.pipeline.ravnest.assignment import ClusterAssignment


@pytest.mark.parametrize("seed", range(30))
def test_seats_over_losses(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))]
    size = sum(lengths) + draw.randint(0, 4)
    assignment = ClusterAssignment.of([range(1, length) for length in lengths], range(size))
    assert assignment.whole == list(range(len(lengths))) and not assignment.complete
    while len(assignment.living) > 1:
        before = assignment
        gone = draw.sample(assignment.living, draw.randint(1, 2))
        assignment = assignment.without(gone)
        assert assignment.without(gone) == assignment and not set(gone) & set(assignment.living)
        hit = {number for number, cluster in enumerate(assignment.clusters) if set(cluster) & assignment.lost}
        assert set(assignment.whole) == set(before.whole) - hit
        repaired = assignment.repaired()
        assert repaired.repaired() == repaired
        named = [position for cluster in repaired.clusters for position in cluster]
        assert len(set(named)) == len(named) and not set(named) & set(repaired.standby)
        assert repaired.living == assignment.living
        for number, (own, now) in enumerate(zip(assignment.clusters, repaired.clusters, strict=True)):
            moved = [old for old, new in zip(own, now, strict=True) if old != new]
            assert set(moved) <= assignment.lost and (not moved or number in repaired.complete)
        lacking = [sum(p in repaired.lost for p in repaired.clusters[number]) for number in repaired.out]
        assert all(not count or count > len(repaired.standby) for count in lacking)
        assignment = repaired.with_loaded(repaired.complete)
        assert not assignment.complete
        assert all(assignment.trains(p) for number in assignment.whole for p in assignment.clusters[number])


def test_where_the_fewest_are_missing_comes_first() -> None:
    assignment = ClusterAssignment.of([[1, 2], [3], []], range(8)).without({0, 1, 4})
    assert assignment.repaired().clusters == ((0, 1, 2), (3, 6), (5,)) and assignment.repaired().standby == (7,)
    assert assignment.repaired().complete == [1]
