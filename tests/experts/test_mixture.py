"""Joining scores: the chain rule, its bound, and what must hold to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from isles.experts import mixture
from isles.experts.evaluation import evaluate
from isles.experts.routing import cached, running, updating

E, N, T = 3, 5, 12


def scores(experts: int = E, scale: float = 3.0, seed: int = 0) -> Tensor:
    """Log-probabilities of tokens that a softmax over some vocabulary could have given."""
    generator = torch.Generator().manual_seed(seed)
    return -scale * torch.rand(experts, N, T, dtype=torch.float64, generator=generator)


def prior(seed: int = 1) -> Tensor:
    return torch.rand(E, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).log_softmax(0)


@pytest.mark.parametrize("scale", [3.0, 300.0])
def test_the_chain_rule_holds_for_the_posterior_alone(scale: float) -> None:
    s_ENT, before = scores(scale=scale), prior()
    whole_N = torch.logsumexp(before[:, None] + s_ENT.sum(-1), 0)

    def total(weights_ENT: Tensor) -> Tensor:
        return mixture.mix(s_ENT, weights_ENT).sum(-1)

    torch.testing.assert_close(total(mixture.posterior(s_ENT, before)), whole_N, rtol=1e-12, atol=0)
    regret_N = -whole_N - (-s_ENT.sum(-1) - before[:, None]).min(0).values
    assert (regret_N <= 1e-9).all()
    for other in (mixture.last_token, mixture.constant):
        assert (total(other(s_ENT, before)) - whole_N).abs().max() > 0.1
    assert (mixture.geometric(s_ENT).sum(-1) - whole_N).abs().max() > 0.1


def test_perplexity_is_within_the_root_of_e_of_the_best_expert() -> None:
    s_ENT = scores()
    for n in range(N):
        one = s_ENT[:, n : n + 1]
        mixed = mixture.perplexity(mixture.mix(one, mixture.posterior(one, mixture.uniform(E))))
        best = min(mixture.perplexity(expert) for expert in one)
        assert mixed <= best * E ** (1 / T) * (1 + 1e-12)


def test_one_expert_equal_experts_and_a_certain_prior_are_that_expert_to_the_bit() -> None:
    one = scores(1)
    assert torch.equal(mixture.mix(one, mixture.posterior(one, mixture.uniform(1))), one[0])
    equal = one.expand(E, N, T)
    for before in (mixture.uniform(E), prior()):
        assert torch.equal(mixture.mix(equal, mixture.posterior(equal, before)), one[0])
    s_ENT = scores()
    certain = torch.tensor([mixture.NEVER, 0.0, mixture.NEVER], dtype=torch.float64)
    assert torch.equal(mixture.mix(s_ENT, mixture.posterior(s_ENT, certain)), s_ENT[1])
    assert torch.equal(mixture.top_k(torch.tensor([-3.0, -0.1, -2.0]).double(), 1), certain)


def test_order_of_the_experts_and_top_k_of_all_change_nothing() -> None:
    s_ENT, before, turned = scores(), prior(), torch.tensor([2, 0, 1])
    here = mixture.mix(s_ENT, mixture.posterior(s_ENT, before))
    there = mixture.mix(s_ENT[turned], mixture.posterior(s_ENT[turned], before[turned]))
    torch.testing.assert_close(here, there, rtol=1e-13, atol=0)
    assert torch.equal(mixture.top_k(before, E), before)
    kept = mixture.top_k(before, 2).exp()
    assert int((kept > 0).sum()) == 2 and math.isclose(float(kept.sum()), 1, rel_tol=1e-12)
    with pytest.raises(ValueError, match=r"top_k = 4: choose 1 to 3"):
        mixture.top_k(before, 4)


def test_the_arithmetic_average_is_never_worse_than_the_geometric() -> None:
    for seed in range(20):
        found = evaluate(scores(seed=seed), scores(seed=seed + 100))["perplexity"]
        assert found["arithmetic"] <= found["geometric"]
        assert found["oracle"] <= found["posterior"] <= found["oracle"] * E ** (1 / T)


def test_an_unlikely_sequence_does_not_vanish_beside_others() -> None:
    s_ENT = scores()
    s_ENT[:, 0] -= 2000.0
    alone = s_ENT[:, :1]
    both = mixture.mix(s_ENT, mixture.posterior(s_ENT, prior()))
    assert torch.isfinite(both).all()
    assert torch.equal(both[:1], mixture.mix(alone, mixture.posterior(alone, prior())))


def test_a_cached_prior_is_the_running_mean_of_posteriors() -> None:
    s_ENT = scores(scale=0.2)
    last = mixture.after(s_ENT[:, -1:], running(s_ENT)[:, -2])[:, 0]
    first = mixture.after(s_ENT[:, :1], mixture.uniform(E))[:, 0]
    torch.testing.assert_close(cached(s_ENT, decay=1.0), mixture.after(s_ENT[:, -1:], _before_last(s_ENT))[:, 0])
    torch.testing.assert_close(cached(s_ENT, decay=1e-12), first)
    expected = 0.7 * running(s_ENT)[:, -2].exp() + 0.3 * last.exp()
    torch.testing.assert_close(cached(s_ENT).exp(), expected)
    for statistic in ("end", "mean"):
        found = cached(s_ENT, statistic=statistic)
        assert math.isclose(float(found.exp().sum()), 1, rel_tol=1e-12)
        assert torch.equal(found, cached(s_ENT, statistic=statistic))


def _before_last(s_ENT: Tensor) -> Tensor:
    return running(s_ENT, decay=1.0)[:, -2]


def test_an_expert_that_one_sequence_rules_out_comes_back() -> None:
    """By 2000 nats, far below the smallest number: the prior stays a running mean and does not stick at log 0."""
    s_ENT = torch.full((2, 4, 10), -1.0, dtype=torch.float64)
    s_ENT[1, 0] = s_ENT[0, 1:] = -201.0
    before_EN = updating(s_ENT)
    assert torch.isfinite(before_EN).all()
    assert float(before_EN[0, 1]) == 0.0 and float(before_EN[1, 1]) == pytest.approx(-2000)
    # The second sequence weighs the 2000 nats up exactly: an even chance, and 0.3 of that in the prior; the others win.
    assert before_EN[:, 2].exp().tolist() == pytest.approx([0.85, 0.15])
    assert before_EN[:, 3].exp().tolist() == pytest.approx([0.7 * 0.85, 0.7 * 0.15 + 0.3])
    smooth_EN = updating(s_ENT, statistic="mean")
    assert torch.isfinite(smooth_EN).all() and float(smooth_EN[1, 3].exp()) > 0.3


def test_an_updating_prior_knows_only_the_sequences_before() -> None:
    s_ENT = scores()
    changed = s_ENT.clone()
    changed[:, 3] = -1.0
    assert torch.equal(updating(s_ENT)[:, :4], updating(changed)[:, :4])
    assert not torch.equal(updating(s_ENT)[:, 4], updating(changed)[:, 4])
    assert torch.equal(updating(s_ENT)[:, 0], mixture.uniform(E))
    with pytest.raises(ValueError, match="decay = 0"):
        updating(s_ENT, decay=0)
    with pytest.raises(ValueError, match="at least one sequence"):
        cached(s_ENT[:, :0])
