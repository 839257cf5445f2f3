"""The replay by hand."""

from __future__ import annotations

import pytest

from isles.network.exchange_plan import (
    Mean,
    MessagePattern,
    PlannedExchange,
    Rhythm,
    Ring,
    Segment,
    ShardSizes,
    Swap,
    Tree,
    by_size,
)
from isles.network.links import Links, Topology
from isles.plan.replay import RunReplay

WORKERS = 8
SLOW = Links(bandwidth=1e6, latency=0.05)


def every_round(pattern: MessagePattern, workers: int, every: int, late: int = 0, sent: float = 0.0):
    """The records of an exchange of all after every `every` steps, landing `late` steps later."""
    groups = (tuple(range(workers)),)
    made = by_size(groups, lambda size: pattern)

    def records(steps: int) -> list[PlannedExchange]:
        return [
            PlannedExchange(at - sent, min(at + late, steps + 1), 0, "payload", groups, made, at)
            for at in range(every, steps + 1, every)
        ]

    return records


@pytest.mark.parametrize(
    ("pattern", "alone"),
    [
        (Swap((1e6,) * 4), 3 * 8.0 + 0.05),
        (Ring(6e6), 6 * (8.0 + 0.05)),
        (Mean((Segment(ShardSizes(((4, 1e6),)), ShardSizes(((4, 1e6),))),), 0), 2 * (3 * 8.0 + 0.05)),
    ],
)
def test_an_exchange_alone_takes_what_it_costs(pattern: MessagePattern, alone: float):
    """Megabytes on 1 Mbit/s."""
    waits = RunReplay(Topology(4, SLOW), [0.1] * 4).waits(every_round(pattern, 4, 10)(10), 10)
    assert waits.account.waiting == pytest.approx(alone)
    assert waits.account.computing == pytest.approx(1.0)


@pytest.mark.parametrize(("late", "sent", "waited"), [(10, 0.0, 0.0), (5, 0.0, 0.35), (0, 0.0, 0.85), (0, 0.5, 0.8)])
def test_what_travels_behind_computing_is_not_waited_for(late: int, sent: float, waited: float):
    """0.8 s and 0.05 s of latency; ten steps hide all of it, five 0.5 s, and half a step 0.05 s."""
    waits = RunReplay(Topology(2, SLOW), [0.1] * 2).waits(every_round(Swap((1e5,) * 2), 2, 10, late, sent)(50), 50)
    assert waits.account_of(11, 40).waiting / 3 == pytest.approx(waited)


def test_a_slow_worker_delays_the_others():
    """It waits until its own message has left, the other until that is there, 0.05 s later."""
    waits = RunReplay(Topology(2, SLOW), [0.1, 0.15]).waits(every_round(Swap((1e5,) * 2), 2, 10)(40), 40)
    assert sum(waits.waited[0]) == pytest.approx((0.5 + 0.85) + 3 * (0.45 + 0.85))
    assert sum(waits.waited[1]) == pytest.approx(4 * 0.8)


def test_the_opening_is_not_counted_and_parts_the_starts():
    groups = ((0, 1),)
    tree = PlannedExchange(0, 0, 0, "opening", groups, by_size(groups, lambda _: Tree(1e5)), 0, "control")
    waits = RunReplay(Topology(2, SLOW), [0.1] * 2, [tree]).waits(every_round(Swap((1e5,) * 2), 2, 10)(10), 10)
    assert waits.waited[0][0] == pytest.approx(0.8) and waits.waited[1][0] == pytest.approx(0.85)
    assert waits.account.waiting == pytest.approx((0.9 + 0.8) / 2)  # the first to start waits 0.05 s longer


@pytest.mark.parametrize("late", [0, 5])
def test_a_long_run_is_played_in_part(late: int):
    """To the same seconds, where all rounds are alike; None where even a few are too many."""
    records, topology, seconds = every_round(Swap((1e5,) * 3), 3, 10, late), Topology(3, SLOW), [0.1] * 3
    replays = RunReplay(topology, seconds, messages=40)
    whole = replays.waits(records(407), 407).account
    part = replays.run(records, Rhythm(0, 10), 407)
    assert part is not None and part.waiting == pytest.approx(whole.waiting) and part.computing == whole.computing
    settled = RunReplay(topology, seconds).long_run(records, Rhythm(0, 10))
    assert settled is not None and settled.waiting == pytest.approx(whole.waiting / 40, rel=0.05)
    assert RunReplay(topology, seconds, messages=2).run(records, Rhythm(0, 10), 407) is None
