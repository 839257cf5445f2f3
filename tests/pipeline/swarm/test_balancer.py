"""Interleaved weighted round robin: shares counted by hand, joiners, losses, measurements."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest

from isles.pipeline.swarm.balancer import MovingAverage, PeerBalancer


def balancer(costs: dict[int, float], seed: int = 0) -> PeerBalancer:
    """With peers that were measured once, at their cost."""
    made = PeerBalancer(seed)
    for peer, cost in costs.items():
        made.join(peer)
        made.answered(peer, cost, 1)
    return made


@pytest.mark.parametrize("seed", range(20))
def test_costs_of_1_2_and_4_take_4_2_and_1_of_the_first_7(seed: int) -> None:
    taken = Counter(run.choose() for run in [balancer({3: 1.0, 5: 2.0, 9: 4.0}, seed)] for _ in range(7))
    assert taken == {3: 4, 5: 2, 9: 1}


@pytest.mark.parametrize("costs", [{0: 1.0, 1: 2.0, 2: 4.0}, {0: 0.3, 1: 0.5, 2: 0.07, 3: 11.0}, {4: 2.0}])
def test_shares_are_as_the_speeds(costs: dict[int, float]) -> None:
    run = balancer(costs, seed=1)
    taken = Counter(run.choose() for _ in range(700))
    total = sum(1 / cost for cost in costs.values())
    for peer, cost in costs.items():
        assert taken[peer] / 700 == pytest.approx(1 / cost / total, abs=0.01)


def test_larger_microbatches_weigh_more() -> None:
    run = balancer({0: 1.0, 1: 1.0})
    first = run.choose(samples=3)
    assert [run.choose() for _ in range(3)] == [1 - first] * 3


def test_who_joins_is_chosen_next() -> None:
    for before in range(3, 40):  # all of them have been tried
        run = balancer({0: 1.0, 1: 2.0, 2: 4.0}, seed=before)
        for _ in range(before):
            run.choose()
        run.join(7)
        run.join(8)
        assert {run.choose(), run.choose()} == {7, 8}


def test_who_joins_takes_its_share_of_what_comes() -> None:
    """A fourth of four equal peers: 30 of the next 120, although the others have had 30 each."""
    run = balancer({0: 1.0, 1: 1.0, 2: 1.0})
    for _ in range(90):
        run.choose()
    run.join(3)
    assert Counter(run.choose() for _ in range(120)) == {0: 30, 1: 30, 2: 30, 3: 30}


def test_who_joins_costs_the_median_until_it_is_measured() -> None:
    run = balancer({0: 1.0, 1: 3.0, 2: 50.0})
    run.join(3)
    assert run.cost(3) == 3.0
    run.answered(3, 8.0, 4)
    assert run.cost(3) == 2.0


def test_who_is_lost_is_never_chosen_and_comes_back_as_a_new_one() -> None:
    run = balancer({0: 1.0, 1: 1.0})
    run.lose(0)
    run.answered(0, 1.0, 1)  # an answer that was on its way
    run.late(0, 1.0, 1)
    assert {run.choose() for _ in range(50)} == {1}
    run.join(0)
    assert run.choose() == 0
    run.lose(0)
    run.lose(1)
    with pytest.raises(LookupError, match="no peer serves this stage"):
        run.choose()


def test_another_one_is_asked_where_there_is_one() -> None:
    run = balancer({0: 1.0, 1: 100.0})
    assert run.choose(besides=0) == 1
    run.lose(1)
    assert run.choose(besides=0) == 0


def test_who_is_late_is_charged() -> None:
    run = balancer({0: 1.0, 1: 1.0})
    run.late(0, 30.0, 1)
    assert run.cost(0) > 10
    assert [run.choose() for _ in range(25)] == [1] * 25


def test_a_line_counts_where_it_is_slower_than_the_peer() -> None:
    run = PeerBalancer()
    run.join(0)
    run.answered(0, 2.0, 2, wire=0.5)
    assert run.cost(0) == 1.0
    run.answered(0, 2.0, 2, wire=1e3)
    known = run.peers[0]
    assert known.compute.value == pytest.approx(1.0)
    assert run.cost(0) == known.wire.value


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
def test_n_equal_measurements_average_to_themselves(alpha: float) -> None:
    average = MovingAverage(alpha)
    assert average.value is None
    for _ in range(500):
        average.add(0.7)
        assert average.value == 0.7


def test_the_average_is_that_of_its_definition() -> None:
    values, average = [3.0, 1.0, 4.0, 1.0, 5.0], MovingAverage()
    for value in values:
        average.add(value)
    weights = [Fraction(1, 10) * Fraction(9, 10) ** back for back in reversed(range(len(values)))]
    expected = sum(weight * Fraction(value) for weight, value in zip(weights, values, strict=True)) / sum(weights)
    assert average.value == pytest.approx(float(expected), rel=1e-14)


@pytest.mark.parametrize("alpha", [0.0, 1.1, -1.0])
def test_a_weight_that_is_none_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha"):
        MovingAverage(alpha)
