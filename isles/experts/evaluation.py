"""How well experts do on a text, in every way of joining them, from their scores alone.

test_ENT, prior_ENT: scores on what is evaluated, and on validation text for the cached prior. Perplexities are per
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isles.experts import mixture
from isles.experts.routing import CACHED_SEQUENCES, cached, updating

SURE = 0.99

JOININGS = {
    "posterior": "posterior, uniform prior",
    "cached": "posterior, cached prior (statistic: end of sequence)",
    "cached_mean": "posterior, cached prior (statistic: mean over positions)",
    "updating": "posterior, updating prior",
    "top_1": "posterior of the likeliest expert of the cached prior alone",
    "last_token": "weights from the last token alone, uniform prior",
    "arithmetic": "arithmetic average",
    "geometric": "geometric average (no distribution)",
    "ridge": "one expert, which the ridge gate chooses from the first tokens (see hdee.run)",
    "oracle": "best single expert of each sequence, known afterwards",
}


def evaluate(test_ENT: Tensor, prior_ENT: Tensor) -> dict[str, Any]:
    """All ways at once, for results.json.

    "perplexity": by way (a key of JOININGS). "alone": each expert's. "mean_posterior": by expert, over tokens.
    "entropy": of the posterior, nats, mean over tokens. "sure_after": tokens until one expert has 99 %, mean over
    sequences (T where never).
    """
    uniform = mixture.uniform(len(test_ENT))
    prior_ENT = prior_ENT[:, :CACHED_SEQUENCES]
    prior = cached(prior_ENT)
    bayes = mixture.posterior(test_ENT, uniform)
    believed = bayes.exp()

    sequences = torch.arange(test_ENT.shape[1], dtype=torch.int64, device="cpu")

    def by(log_prior: Tensor) -> Tensor:
        return mixture.mix(test_ENT, mixture.posterior(test_ENT, log_prior))

    scored = {
        "posterior": mixture.mix(test_ENT, bayes),
        "cached": by(prior),
        "cached_mean": by(cached(prior_ENT, statistic="mean")),
        "updating": by(updating(test_ENT)),
        "top_1": by(mixture.top_k(prior, 1)),
        "last_token": mixture.mix(test_ENT, mixture.last_token(test_ENT, uniform)),
        "arithmetic": mixture.mix(test_ENT, mixture.constant(test_ENT, uniform)),
        "geometric": mixture.geometric(test_ENT),
        "oracle": test_ENT[test_ENT.sum(-1).argmax(0), sequences],
    }
    return {
        "perplexity": {joining: mixture.perplexity(scores) for joining, scores in scored.items()},
        "alone": [mixture.perplexity(scores) for scores in test_ENT],
        "mean_posterior": believed.mean((1, 2)).tolist(),
        "entropy": float(-torch.xlogy(believed, believed).sum(0).mean()),
        "sure_after": _sure_after(believed),
    }


def _sure_after(believed_ENT: Tensor) -> float:
    sure_NT = believed_ENT.amax(0) > SURE
    length = sure_NT.shape[1]
    first_N = torch.where(
        sure_NT.any(1), sure_NT.double().argmax(1), torch.tensor(length, dtype=torch.int64, device="cpu")
    )
    return float(first_N.double().mean())


def mean_of(records: Sequence[Any]) -> Any:
    """Mean of equal nested records of numbers or None (one a seed), number by number."""
    first = records[0]
    if first is None:
        return None
    if isinstance(first, dict):
        return {key: mean_of([record[key] for record in records]) for key in first}
    if isinstance(first, list):
        return [mean_of(list(column)) for column in zip(*records, strict=True)]
    return sum(records) / len(records)
