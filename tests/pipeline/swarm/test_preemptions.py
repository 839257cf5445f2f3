"""Moves under a log of preemptions, simulated: what is counted, and the order of the policies."""

from __future__ import annotations

import pytest

from benchmarks.swarm import Fleet, queues_of, share, table


def test_queues_add_up_and_the_slowest_stage_has_the_longest() -> None:
    queues = queues_of([2.0, 4.0, 3.0], 30)
    assert sum(queues) == pytest.approx(30)
    assert queues[0] > queues[2] > queues[1]


def test_who_moves_serves_nobody_until_it_has_its_gift() -> None:
    fleet = Fleet(seed=0, gift=60.0, directed=True)
    fleet.stages, fleet.ready = {0: 0, 1: 1, 2: 1}, dict.fromkeys(range(3), 0.0)
    before = fleet.rates(10.0)
    fleet.move(2, 0, 10.0)
    assert fleet.rates(69.0) == [before[0], fleet.speed(1), 0.0, 0.0]
    assert fleet.rates(70.0)[0] == before[0] + fleet.speed(2)


def test_a_log_ends_where_it_ended_before() -> None:
    assert share("hysteresis", 3, 2.0, 60.0) == share("hysteresis", 3, 2.0, 60.0)


@pytest.mark.long(cases=0)
def test_the_policies_stand_in_their_order_over_ten_logs() -> None:
    _, rows = table([0.0, 60.0], seeds=10, hours=32.0)
    assert all(row.kept for row in rows), rows
