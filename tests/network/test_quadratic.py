"""NoLoCo's theory: recursions against simulated workers, and the limits of stability."""

import math
from dataclasses import replace

import numpy as np
import pytest

from isles.replicas.parts.quadratic import (
    Quadratic,
    disagreement,
    heavy_ball,
    mean_path,
    radius,
    retained_share,
    simulate,
    variance,
)


@pytest.mark.parametrize("workers", [2, 3, 4, 16])
def test_settled_variances_are_those_of_simulated_workers(workers):
    setting = Quadratic(workers=workers, rate=0.02)
    phi = simulate(setting, rounds=80, copies=4000)
    mean = phi.mean(axis=1)
    found = variance(setting)
    assert mean.var() == pytest.approx(found.mean, rel=0.1)
    assert ((phi - mean[:, None]) ** 2).mean() == pytest.approx(found.replicas, rel=0.1, abs=1e-30)


def test_inner_steps_are_what_they_should_be():
    setting, random = Quadratic(rate=0.1, inner_steps=7, curvature=2.0, noise=3.0), np.random.default_rng(0)
    theta = np.ones(200_000)
    for _ in range(7):
        theta -= setting.rate * setting.curvature * (theta - setting.noise * random.standard_normal(theta.shape))
    assert theta.mean() == pytest.approx(1 - setting.progress, abs=0.02)
    assert theta.var() == pytest.approx(setting.inner_variance, rel=0.02)


def test_halving_the_rate_quarters_the_replicas_variance():
    small = Quadratic(rate=1e-5)
    ratio = [variance(small), variance(replace(small, rate=5e-6))]
    assert ratio[0].replicas / ratio[1].replicas == pytest.approx(4, rel=0.01)
    assert ratio[0].mean / ratio[1].mean == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.9])
@pytest.mark.parametrize(("workers", "limit"), [(2, lambda a: 2 * (1 + a)), (10**9 + 1, lambda a: 2 * (1 - a * a))])
def test_where_replicas_stay_together(alpha, workers, limit):
    for gamma, together in ((0.999 * limit(alpha), True), (1.001 * limit(alpha), False)):
        assert (radius(disagreement(alpha, gamma, retained_share(workers))) < 1) == together


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
def test_where_the_mean_shrinks(alpha):
    for pull, shrinks in ((1.999 * (1 + alpha), True), (2.001 * (1 + alpha), False), (0.01, True), (-0.01, False)):
        assert (radius(heavy_ball(alpha, pull)) < 1) == shrinks


def test_the_mean_follows_its_recursion():
    setting = Quadratic(rate=0.05)
    path = mean_path(setting, 20)
    step = 1 + setting.alpha - setting.beta * setting.progress
    assert path[0] == 1 and path[1] == pytest.approx(1 - setting.beta * setting.progress)
    assert np.allclose(path[2:], step * path[1:-1] - setting.alpha * path[:-2])


def test_what_is_not_stable_has_no_variance():
    wild = Quadratic(alpha=0.9, gamma=0.7, rate=1e-5, workers=101)
    assert variance(wild).replicas == math.inf and variance(wild).mean < math.inf
    assert variance(replace(wild, rate=0.01)).replicas < math.inf  # inner progress pulls together as well


@pytest.mark.parametrize("key", ["rate", "curvature", "inner_steps", "workers"])
def test_what_makes_no_sense_is_refused(key):
    with pytest.raises(ValueError, match=key):
        Quadratic(**{key: 0})
    with pytest.raises(ValueError, match="below 2"):
        Quadratic(rate=2.0)
