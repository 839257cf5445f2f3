"""The stability of random groups: the 3 x 3 matrix of its second moments, and simulated disagreement."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from isles.replicas.methods.noloco import DeltaPhi
from isles.replicas.parts.choices import RandomGroups
from isles.replicas.parts.interfaces import Answer, RuleState
from isles.replicas.parts.quadratic import group_matrix, group_radius, largest_gamma, warn_unless_stable


@pytest.mark.parametrize(
    ("alpha", "gamma", "printed"),
    [
        (0.0, 1.00, 0.50),
        (0.3, 0.58, 0.55),
        (0.5, 0.30, 0.63),
        (0.7, 0.10, 0.75),
        (0.9, 0.01, 0.91),
        (0.5, 0.7, 0.70),
        (0.5, 1.0, 0.79),
        (0.9, 0.7, 1.10),
    ],
)
def test_spectral_radius_has_the_table_s_digits(alpha: float, gamma: float, printed: float) -> None:
    """Oracle: the spec's table and text, to the digits printed there."""
    assert round(group_radius(alpha, gamma), 2) == printed


@pytest.mark.parametrize(("alpha", "best"), [(0.0, 1.0), (0.3, 0.58), (0.5, 0.30), (0.7, 0.10), (0.9, 0.01)])
def test_gamma_of_the_smallest_radius(alpha: float, best: float) -> None:
    """Oracle: the table's column of the best gamma."""
    gammas = np.arange(1, 2000) / 1000
    found = gammas[np.argmin([group_radius(alpha, gamma) for gamma in gammas])]
    assert abs(found - best) < 0.006


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
def test_pairs_are_stable_below_two_times_one_minus_alpha_squared(alpha: float) -> None:
    """Oracle: for n = 2 the bound is 2 (1 - alpha^2) exactly."""
    bound = 2 * (1 - alpha**2)
    assert largest_gamma(alpha) == pytest.approx(bound, abs=1e-6)
    assert group_radius(alpha, bound * 0.999) < 1 < group_radius(alpha, bound * 1.001)


@pytest.mark.parametrize(("group_size", "alpha"), [(2, 0.3), (3, 0.5), (4, 0.7)])
def test_matrix_is_one_round_of_the_moments(group_size: int, alpha: float) -> None:
    """Oracle: the outer step itself, on a group of independent members, by the law of large numbers."""
    gamma, count = 0.6, 400_000
    generator = torch.Generator().manual_seed(0)
    phi = torch.randn(group_size, count, generator=generator, dtype=torch.float64)
    delta = 0.5 * phi + torch.randn(group_size, count, generator=generator, dtype=torch.float64)
    before = torch.stack([phi.square().mean(), (phi * delta).mean(), delta.square().mean()])
    new_delta = alpha * delta - gamma * (phi - phi.mean(0))
    new_phi = phi + new_delta
    after = torch.stack([new_phi.square().mean(), (new_phi * new_delta).mean(), new_delta.square().mean()])
    expected = torch.from_numpy(group_matrix(alpha, gamma, group_size)) @ before
    assert torch.allclose(after, expected, rtol=0.02, atol=0.01)


def variance_factor(alpha: float, gamma: float, workers: int = 32, rounds: int = 200) -> float:
    """Long-run factor a round of the replicas' variance, without inner progress, with the library's own rule and
    groups.
    """
    generator = torch.Generator().manual_seed(1)
    anchors = torch.randn(workers, 64, generator=generator, dtype=torch.float64)
    momenta = torch.zeros_like(anchors)
    mixing, rule = RandomGroups(2, seed=5), DeltaPhi(beta=0.7, momentum=alpha, gamma=gamma)
    total, totals = 0.0, []
    for round in range(1, rounds + 1):
        means = [anchors[list(mixing.members(round, workers, position))].mean(0) for position in range(workers)]
        for position in range(workers):
            answer = Answer(torch.zeros(64, dtype=torch.float64), means[position], anchors[position])
            rule.apply(anchors[position], answer, RuleState({"momentum": momenta[position]}), 1)
        variance = float(anchors.var(0).mean())
        total += np.log(variance)
        totals.append(total)
        anchors = (anchors - anchors.mean(0)) / variance**0.5  # the rule is linear: keep the numbers near 1
        momenta = (momenta - momenta.mean(0)) / variance**0.5
    return float(np.exp((totals[-1] - totals[19]) / (rounds - 20)))


@pytest.mark.parametrize(
    ("alpha", "gamma", "measured"),
    [(0.5, 0.7, 0.69), (0.5, 1.45, 0.95), (0.5, 1.6, 1.03), (0.9, 0.3, 0.97), (0.9, 0.7, 1.09)],
)
def test_disagreement_shrinks_exactly_below_the_bound(alpha: float, gamma: float, measured: float) -> None:
    """Oracle: the spec's points for 32 workers (sample-path values), and the sign of factor - 1."""
    factor = variance_factor(alpha, gamma)
    assert (factor < 1) == (gamma < 2 * (1 - alpha**2))
    assert factor == pytest.approx(measured, abs=0.03)


def test_warning_names_the_bound() -> None:
    """gamma >= 2 (1 - alpha^2), and gamma = 0, are warned of; stable settings are not."""
    with pytest.warns(UserWarning, match=r"choose 0 < gamma < 0\.38"):
        warn_unless_stable(0.9, 0.7, 2)
    with pytest.warns(UserWarning, match="gamma = 0 with"):
        warn_unless_stable(0.5, 0.0, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_unless_stable(0.5, 1.49, 2)
