"""What churn costs, planned: its limits, and that it follows the rates."""

from __future__ import annotations

import math

import pytest

from isles.membership.messages import MARGIN
from isles.network.churn import Poisson
from isles.plan.worker_classes import AHEAD, ChurnCosts, churn_costs


def costs(per_second: float, seconds: float = 300.0, rounds: int | None = None, *, pairs: bool = True) -> ChurnCosts:
    return churn_costs(
        Poisson(per_second=per_second),
        workers=100,
        parameters=1e6,
        computing=seconds,
        waits=0.0,
        bytes_a_round=8e6,
        rounds=rounds,
        pairs=pairs,
    )


def test_nobody_dies_and_nothing_is_lost() -> None:
    none = costs(0.0)
    assert (none.alone, none.lost, none.waiting, none.goodput, none.state_bytes) == (0.0, 0.0, 0.0, 1.0, 0.0)
    assert none.relayed == 2 * 8 * 100 * 8e6 / 300  # every byte comes in and goes out


def test_the_rounds_ahead_are_those_of_the_views() -> None:
    assert AHEAD == MARGIN


def test_small_rates_cost_in_proportion() -> None:
    rate = 1e-7
    one = costs(rate)
    assert one.alone == pytest.approx(AHEAD * 300 * rate, rel=1e-3)
    assert one.lost == pytest.approx(300 * rate / 2, rel=1e-3)  # half a round a death
    assert one.state_bytes == pytest.approx(2 * 100 * rate * 3600 * 20e6)


def test_short_runs_are_better_off_than_the_long_run() -> None:
    """In the first rounds nobody can have died long ago."""
    rate = 1 / 3600
    first, some, long = (costs(rate, rounds=rounds).alone for rounds in (1, 12, None))
    assert first == pytest.approx(1 - math.exp(-300 * rate)) and first < some < long
    assert costs(rate, rounds=10_000).alone == pytest.approx(long, rel=1e-3)
    assert costs(rate, seconds=600.0).goodput < costs(rate).goodput < 1.0


def test_where_all_take_one_mean_nobody_is_alone_and_a_death_costs_its_round() -> None:
    rate = 1 / 3600
    mean, pairs = costs(rate, pairs=False), costs(rate)
    assert mean.alone == 0.0 and mean.lost == pytest.approx(300 * rate / 2)
    assert mean.lost < pairs.lost and mean.waiting == pairs.waiting and mean.goodput > pairs.goodput
