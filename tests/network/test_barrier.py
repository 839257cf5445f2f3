"""Waiting for all against waiting for a partner: the law of a sum, the paper's numbers, invariants."""

import math
from statistics import mean

import numpy as np
import pytest

from isles.papers.noloco import StepLaw, waiting


@pytest.mark.parametrize(("count", "variance"), [(1, 0.5), (2, 2.0), (30, 0.5)])
def test_the_law_of_a_sum(count, variance):
    """A hundred thousand sums, step by step, fall below the table's quantiles as often as they should."""
    steps, random, draws = StepLaw(count=count, variance=variance), np.random.default_rng(1), 100_000
    total = sum(np.exp(steps.mu + math.sqrt(variance) * random.standard_normal(draws)) for _ in range(count))
    z, seconds = steps.quantiles()
    for deviation in (-2.0, 0.0, 2.0, 3.0):
        chance = 0.5 * math.erfc(-deviation / math.sqrt(2))
        share = (total <= np.interp(deviation, z, seconds)).mean()
        assert abs(share - chance) < 5 * math.sqrt(chance * (1 - chance) / draws)
    drawn = steps.sampler(random).draw(draws)
    assert drawn.mean() == pytest.approx(steps.mean, rel=0.015)


# Section 2.10 of the specification: 100 rounds, one run, whose ratio at one inner step varies by 3 %.
@pytest.mark.parametrize(
    ("inner_steps", "few", "many"), [(100, 1.11, 1.19), (50, 1.16, 1.29), (10, 1.37, 1.75), (1, 1.96, 3.2)]
)
def test_ratios_of_the_specification(inner_steps, few, many):
    steps = StepLaw(count=inner_steps)
    for workers, wanted in ((64, few), (1024, many)):
        runs = [waiting(workers, steps, seed=seed) for seed in range(3)]
        assert mean(run.ratio for run in runs) == pytest.approx(wanted, rel=0.05)


def test_who_waits_for_whom():
    two = waiting(2, StepLaw(count=3))
    assert two.everybody_seconds == pytest.approx(two.partner_last_seconds)
    alone = waiting(1, StepLaw(count=3))
    assert alone.everybody_seconds == pytest.approx(alone.partner_last_seconds)
    alike = waiting(7, StepLaw(count=3, variance=0.0), rounds=5)
    assert alike.everybody_seconds == pytest.approx(alike.partner_last_seconds) == pytest.approx(5 * 3 * math.e)
    for workers in (3, 64, 65):
        run = waiting(workers, StepLaw(count=5))
        assert run.everybody_seconds >= run.partner_last_seconds > 100 * StepLaw(count=5).mean
        assert run == waiting(workers, StepLaw(count=5))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: waiting(0, StepLaw(count=1)), "workers = 0"),
        (lambda: waiting(2, StepLaw(count=1), rounds=0), "rounds = 0"),
        (lambda: StepLaw(count=0), "0 inner steps"),
        (lambda: StepLaw(count=1, variance=-1), "variance = -1"),
        (lambda: StepLaw(count=1, mu=math.nan), "mu = nan"),
    ],
)
def test_what_makes_no_sense_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
