"""Tree against pair: the table of the specification, within what the number of trees can tell."""

import math

import numpy as np
import pytest

from isles.papers.noloco import pair_seconds, ratios, sigma_of, swap_seconds, two_shot_seconds

# Section 2.10 of the specification of NoLoCo; its own standard errors are below 0.3 %.
WORKERS = [4, 16, 64, 256, 1024]
TABLE = {
    0.0: (2, 4, 6, 8, 10),
    0.5: (2.10, 4.50, 7.05, 9.69, 12.39),
    1.0: (2.22, 5.18, 8.68, 12.60, 16.96),
    2.0: (2.39, 6.40, 12.22, 20.29, 31.07),
    2.5: (2.45, 6.88, 13.79, 24.01, 39.12),
}


@pytest.mark.parametrize("cv", TABLE)
def test_table_of_ratios(cv):
    for row, wanted in zip(ratios(WORKERS, cv, rounds=2000), TABLE[cv], strict=True):
        assert abs(row.ratio - wanted) <= 4 * math.hypot(row.standard_error, 0.003 * wanted * (cv > 0)) + 1e-9
        assert row.standard_error < 0.02 * wanted


def test_constant_times_count_levels():
    assert [row.ratio for row in ratios([2, 64, 1024], 0.0, 3)] == [1.0, 6.0, 10.0]
    assert pair_seconds(0.0) == 2.0


def tree_seconds(workers, cv, rounds, seed):
    """One tree at a time, up and down, message by message."""
    random, total = np.random.default_rng(seed), np.zeros(rounds)
    for _ in ("up", "down"):
        ready = np.zeros((rounds, workers))
        while ready.shape[1] > 1:
            sigma = sigma_of(cv)
            arrived = ready + np.exp(sigma * random.standard_normal(ready.shape) - sigma**2 / 2)
            ready = np.maximum(arrived[:, ::2], arrived[:, 1::2])
        total += ready[:, 0]
    return total


def test_one_tree_at_a_time_agrees_with_the_forest():
    times = tree_seconds(64, 1.0, 4000, seed=3)
    (row,) = ratios([64], 1.0, 4000, seed=5)
    error = times.std() / math.sqrt(len(times)) / pair_seconds(1.0)
    assert abs(times.mean() / pair_seconds(1.0) - row.ratio) < 4 * math.hypot(error, row.standard_error)
    assert ratios([64], 1.0, 10, seed=3) == ratios([64], 1.0, 10, seed=3)


@pytest.mark.parametrize("workers", [2, 5])
def test_two_shots_are_what_their_messages_take(workers):
    """Message by message."""
    random, sigma, rounds = np.random.default_rng(1), sigma_of(1.0), 40_000
    first, second = np.exp(sigma * random.standard_normal((2, rounds, workers, workers)) - sigma**2 / 2)
    apart = ~np.eye(workers, dtype=bool)
    ready = (first * apart).max(axis=1)  # [from, to] -> to
    done = ((ready[:, :, None] + second) * apart).max(axis=(1, 2))
    drawn = two_shot_seconds(workers, 1.0, rounds)
    assert drawn.mean() == pytest.approx(done.mean(), rel=0.02)
    assert np.quantile(drawn, 0.95) == pytest.approx(np.quantile(done, 0.95), rel=0.03)


def test_constant_times_make_two_shots_two():
    assert two_shot_seconds(64, 0.0, 2).tolist() == [2.0, 2.0] and two_shot_seconds(1, 1.0, 1) == 0
    assert swap_seconds(0.0) == 1.0


def test_a_pair_is_a_tree_of_two():
    times = tree_seconds(2, 1.0, 200_000, seed=0)
    assert times.mean() == pytest.approx(pair_seconds(1.0), rel=0.01)
    assert sigma_of(1.0) ** 2 == pytest.approx(math.log(2))


@pytest.mark.parametrize("call", [lambda: two_shot_seconds(0, 1.0, 1), lambda: ratios([2], 1.0, 0)])
def test_none_is_refused(call):
    with pytest.raises(ValueError, match="choose 1 or more"):
        call()


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="cv = -1"):
        pair_seconds(-1)
    with pytest.raises(ValueError, match="powers of two"):
        ratios([3], 1.0, 1)
