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
    seats = ClusterAssignment.of([range(1, length) for length in lengths], range(size))
    assert seats.whole == list(range(len(lengths))) and not seats.complete
    while len(seats.living) > 1:
        before = seats
        gone = draw.sample(seats.living, draw.randint(1, 2))
        seats = seats.without(gone)
        assert seats.without(gone) == seats and not set(gone) & set(seats.living)
        hit = {number for number, cluster in enumerate(seats.clusters) if set(cluster) & seats.lost}
        assert set(seats.whole) == set(before.whole) - hit
        mended = seats.mended()
        assert mended.mended() == mended
        named = [position for cluster in mended.clusters for position in cluster]
        assert len(set(named)) == len(named) and not set(named) & set(mended.waiting)
        assert mended.living == seats.living
        for number, (own, now) in enumerate(zip(seats.clusters, mended.clusters, strict=True)):
            moved = [old for old, new in zip(own, now, strict=True) if old != new]
            assert set(moved) <= seats.lost and (not moved or number in mended.complete)
        lacking = [sum(p in mended.lost for p in mended.clusters[number]) for number in mended.out]
        assert all(not count or count > len(mended.waiting) for count in lacking)
        seats = mended.joined(mended.complete)
        assert not seats.complete
        assert all(seats.trains(p) for number in seats.whole for p in seats.clusters[number])


def test_where_the_fewest_are_missing_comes_first() -> None:
    seats = ClusterAssignment.of([[1, 2], [3], []], range(8)).without({0, 1, 4})
    assert seats.mended().clusters == ((0, 1, 2), (3, 6), (5,)) and seats.mended().waiting == (7,)
    assert seats.mended().complete == [1]
