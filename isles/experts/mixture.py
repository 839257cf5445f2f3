"""Joining experts by their probabilities: pure functions on scores, no models.

    P(j | x_<t)    = P(j) prod_{s<t} p_j(x_s | x_<s) / sum_i P(i) prod_{s<t} p_i(x_s | x_<s)
    p(x_t | x_<t)  = sum_j P(j | x_<t) p_j(x_t | x_<t)

(Branch-Train-Merge, arXiv 2208.03306; HDEE, arXiv 2502.19385.) scores_ENT[j, n, t] = log p_j(x_t | x_<t) of sequence n,
float64, nats. Everything stays in log space and is shifted over the experts alone, so that a sequence which is unlikely
beside the others of its batch cannot vanish. A prior is log P(j): (E,), or (E, N) where sequences differ.

The chain rule holds: sum_t log p(x_t | x_<t) = logsumexp_j (log P(j) + sum_t log p_j(x_t | x_<t)), and therefore
-log p(x) <= min_j (-log p_j(x) + log 1/P(j)). It does not hold for the weights of `last_token` nor for `geometric`.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEVER = float("-inf")


def uniform(experts: int) -> Tensor:
    """log 1/E for each expert, (E,)."""
    return torch.full((experts,), 1.0 / experts, dtype=torch.float64, device="cpu").log()


def posterior(scores_ENT: Tensor, log_prior: Tensor) -> Tensor:
    """log P(j | x_<t), (E, N, T): the weights before token t is seen; at t = 0 they are the prior."""
    before_ENT = torch.zeros_like(scores_ENT)
    before_ENT[..., 1:] = scores_ENT[..., :-1].cumsum(-1)
    return torch.log_softmax(_wide(log_prior) + before_ENT, dim=0)


def last_token(scores_ENT: Tensor, log_prior: Tensor) -> Tensor:
    """The weights of DEMix's and BTM's public code, (E, N, T): prior times the likelihood of the last token alone. For
    comparison; the chain rule does not hold for them.
    """
    last_ENT = torch.zeros_like(scores_ENT)
    last_ENT[..., 1:] = scores_ENT[..., :-1]
    return torch.log_softmax(_wide(log_prior) + last_ENT, dim=0)


def constant(scores_ENT: Tensor, log_prior: Tensor) -> Tensor:
    """The prior at every token, (E, N, T); with the uniform one, the arithmetic average."""
    return torch.log_softmax(_wide(log_prior) + torch.zeros_like(scores_ENT), dim=0)


def after(scores_ENT: Tensor, log_prior: Tensor) -> Tensor:
    """log P(j | x) after whole sequences, (E, N)."""
    log_prior_EN = log_prior if log_prior.ndim == 2 else log_prior[:, None]
    return torch.log_softmax(log_prior_EN + scores_ENT.sum(-1), dim=0)


def mix(scores: Tensor, log_weights: Tensor) -> Tensor:
    """log sum_j w_j p_j over the first axis; both (E, ...), or weights that broadcast. A weight of log 0 takes an
    expert out.

    The result lies between the smallest and the largest score of the experts that count, as it must; held there, one
    expert, equal experts and a weight of 1 give that expert's score to the bit.
    """
    mixed = torch.logsumexp(log_weights + scores, dim=0)
    counts = (log_weights > NEVER).expand_as(scores)
    most = scores.masked_fill(~counts, NEVER).amax(0)
    least = scores.masked_fill(~counts, -NEVER).amin(0)
    return mixed.clamp(least, most)


def geometric(scores_ENT: Tensor) -> Tensor:
    """Mean of the log-probabilities, (N, T): not a distribution (it sums to less than 1), and never above the
    arithmetic average.
    """
    return scores_ENT.mean(0)


def top_k(log_prior: Tensor, k: int) -> Tensor:
    """The prior (or weights: E first) with all but its `k` largest entries at log 0, normalised again; equal entries:
    the first expert stays. ValueError unless 1 <= k <= E.
    """
    experts = log_prior.shape[0]
    if not 1 <= k <= experts:
        raise ValueError(f"top_k = {k}: choose 1 to {experts}, for there are {experts} experts")
    if k == experts:
        return log_prior
    order = log_prior.argsort(dim=0, descending=True, stable=True)
    largest = torch.full_like(log_prior, NEVER).scatter(0, order[:k], log_prior.gather(0, order[:k]))
    return torch.log_softmax(largest, dim=0)


def perplexity(scores: Tensor) -> float:
    """exp of the mean negative log-probability of all entries."""
    return float((-scores.mean()).exp())


def _wide(log_prior: Tensor) -> Tensor:
    """(E,) or (E, N) to what broadcasts with (E, N, T)."""
    return log_prior[:, None, None] if log_prior.ndim == 1 else log_prior[..., None]
