"""Gates: which expert a sequence belongs to, from its first tokens alone.

routers     one small model an expert; the score is the prefix's log-likelihood (SMALLTALK LM)
clusters    the score is minus the squared distance to the expert's centre (c-BTM)

What is believed of the experts before a sequence begins: log P(j), (E,).

uniform    1/E
cached     P_1 = pi_1;  P_n = (1 - decay) P_{n-1} + decay pi_n  over sequences of validation text, then frozen
updating   the same rule on the text that is evaluated: the prior of a sequence comes from those before it

pi_n is the posterior of sequence n, computed with P_{n-1} as its prior (pi_1 with the uniform one). Statistic "end": at
the sequence's end, where it is nearly one-hot; "mean": its mean over the positions, which makes a smoother prior.
Everything stays in log space: an expert that one sequence rules out by 1000 nats is at log 0 as a number, and would
never come back.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from isles.data.tokenizer import Tokenizer
from isles.experts import mixture
from isles.experts.forest import Forest, Served
from isles.experts.mixture import after, posterior, uniform
from isles.experts.routing.assignment import assign
from isles.experts.routing.clusters import TAU, Clusters, texts_of

_STEP = 1 / 4096  # nats: a 16-bit score reaches 16 nats a token
_NO_NUMBER = 65535  # so that a router that diverged is seen by all workers alike, and not taken for a sure one


class Gate(Protocol):
    """What decides. Higher scores are better."""

    def scores(self, tokens: Tensor, prefix: int) -> Tensor:
        """(E, N) float64 for sequences (N, T), of which the first `prefix` tokens are read; shorter ones whole."""

    def log_chances(self, scores_EN: Tensor) -> Tensor:
        """(E, N): what the scores mean as probabilities, in logs."""


class Routers:
    """A small model an expert."""

    def __init__(self, models: Served) -> None:
        self.models = models

    def scores(self, tokens: Tensor, prefix: int) -> Tensor:
        """Log-likelihood of the prefix behind its first token. ValueError where nothing is left to score."""
        length = min(prefix, tokens.shape[1])
        if length < 2:
            raise ValueError("routing needs a prompt of at least 2 tokens: give a longer one")
        return self.models.scores(tokens[:, :length]).sum(-1)

    def log_chances(self, scores_EN: Tensor) -> Tensor:
        """Bayes with a uniform prior."""
        return scores_EN.log_softmax(0)


class ByClusters:
    """Centres over words."""

    def __init__(self, clusters: Clusters, tokenizer: Tokenizer) -> None:
        self.clusters, self.tokenizer = clusters, tokenizer

    def scores(self, tokens: Tensor, prefix: int) -> Tensor:
        """Minus the squared distance to each centre."""
        texts = texts_of(tokens[:, :prefix].numpy(), self.tokenizer)
        return torch.from_numpy(-self.clusters.distances(texts).T)

    def log_chances(self, scores_EN: Tensor) -> Tensor:
        """c-BTM's weights."""
        return (scores_EN / TAU).log_softmax(0)


def gate_of(forest: Forest, tokenizer: Tokenizer) -> Gate | None:
    """The gate of a forest, its models loaded; None where all experts are mixed."""
    if forest.clusters is not None:
        return ByClusters(Clusters.load(Path(forest.clusters)), tokenizer)
    return Routers(Served.load(forest.routers)) if forest.routers else None


def route(gate: Gate, tokens: Tensor, prefix: int) -> Tensor:
    """(N,) the expert of each sequence, the lower number where two score the same."""
    return torch.from_numpy(assign(gate.scores(tokens, prefix).T.numpy(), "unbalanced"))


def weights_of(gate: Gate, tokens: Tensor, experts: int) -> Tensor:
    """(E, N) log-weights of what follows sequences (N, T), of which the gate reads all; uniform behind a single token,
    which says too little.
    """
    if tokens.shape[1] < 2:
        return mixture.uniform(experts)[:, None].expand(experts, len(tokens))
    return gate.log_chances(gate.scores(tokens, tokens.shape[1]))


def growing(gate: Gate, tokens: Tensor, experts: int, every: int) -> Tensor:
    """(E, N, T) log-weights of the tokens of (N, T + 1) behind the first, for `mixture.mix`: those of `weights_of` for
    the text so far, computed again after each `every` tokens. (c-BTM, arXiv 2303.14177, where `every` is 1.)
    """
    length = tokens.shape[1] - 1
    blocks = [weights_of(gate, tokens[:, : start + 1], experts) for start in range(0, length, every)]
    return torch.stack(blocks, dim=-1).repeat_interleave(every, dim=-1)[..., :length]


def to_wire(mean_N: Tensor) -> Tensor:
    """Mean log-probabilities a token (N,) as 16-bit fixed point, uint8 (2 N,): -score in steps of 1/4096 nat."""
    steps_N = (-mean_N.double() / _STEP).round().clamp(0, _NO_NUMBER - 1)
    steps_N = steps_N.masked_fill(mean_N.isnan(), _NO_NUMBER)
    return torch.from_numpy(steps_N.to(torch.int64).numpy().astype("<u2").view(np.uint8).copy())


def from_wire(wire: Tensor) -> np.ndarray:
    """(N,) float64 of `to_wire`, the same on every machine."""
    steps_N = wire.numpy().view("<u2")
    return np.where(steps_N == _NO_NUMBER, np.nan, -steps_N.astype(np.float64) * _STEP)


Statistic = Literal["end", "mean"]
DECAY = 0.3
CACHED_SEQUENCES = 100


def following(
    believed_E: Tensor, scores_ET: Tensor, *, first: bool, decay: float = DECAY, statistic: Statistic = "end"
) -> Tensor:
    """log P_n from log P_{n-1} and the scores of sequence n. first: it is the first one, so P_{n-1} leaves no trace."""
    one_E1T = scores_ET[:, None]
    if statistic == "end":
        log_pi = after(one_E1T, believed_E)[:, 0]
    else:
        log_pi = posterior(one_E1T, believed_E).logsumexp((1, 2))  # the mean, but for a constant
    log_pi = log_pi.log_softmax(0)
    if not first and decay < 1:
        log_pi = torch.logaddexp(math.log1p(-decay) + believed_E, math.log(decay) + log_pi)
    return log_pi.log_softmax(0)


def running(scores_ENT: Tensor, *, decay: float = DECAY, statistic: Statistic = "end") -> Tensor:
    """log P_n for n = 0..N, (E, N + 1): column n is what is believed before sequence n; the first is uniform.

    ValueError for a decay outside of (0, 1].
    """
    if not 0 < decay <= 1:
        raise ValueError(f"decay = {decay}: choose more than 0 and at most 1, such as {DECAY}")
    believed = [uniform(len(scores_ENT))]
    for n in range(scores_ENT.shape[1]):
        believed.append(following(believed[-1], scores_ENT[:, n], first=n == 0, decay=decay, statistic=statistic))
    return torch.stack(believed, dim=1)


def cached(scores_ENT: Tensor, *, decay: float = DECAY, statistic: Statistic = "end") -> Tensor:
    """The prior (E,) that sequences of validation text leave behind. ValueError where there is none."""
    if not scores_ENT.shape[1]:
        raise ValueError("a cached prior needs at least one sequence of validation text: raise validation_fraction")
    return running(scores_ENT, decay=decay, statistic=statistic)[:, -1]


def updating(scores_ENT: Tensor, *, decay: float = DECAY, statistic: Statistic = "end") -> Tensor:
    """The prior (E, N) of each sequence, from those before it."""
    return running(scores_ENT, decay=decay, statistic=statistic)[:, :-1]


def parse_prior(shares: str, experts: int) -> Tensor:
    """log P(j) (E,) from shares as a person writes them, "0.2,0.3,0.5". ValueError unless there are `experts` of them,
    each at least 0, that sum to 1.
    """
    try:
        found = torch.tensor([float(share) for share in shares.split(",")], dtype=torch.float64, device="cpu")
    except ValueError:
        found = torch.zeros(0, dtype=torch.float32, device="cpu")
    if len(found) != experts or not abs(float(found.sum()) - 1) < 1e-3 or float(found.min()) < 0:
        raise ValueError(
            f"shares {shares!r}: give {experts} numbers of at least 0 that sum to 1, with commas between them"
        )
    return (found / found.sum()).log()
