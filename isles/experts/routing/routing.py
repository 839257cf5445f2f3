"""Gates: which expert a sequence belongs to, from its first tokens alone.

routers     one small model an expert; the score is the prefix's log-likelihood (SMALLTALK LM)
clusters    the score is minus the squared distance to the expert's centre (c-BTM)
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from isles.data.tokenizer import Tokenizer
from isles.experts import mixture
from isles.experts.registry import Forest
from isles.experts.routing.assignment import assign
from isles.experts.routing.clusters import TAU, Clusters, texts_of
from isles.experts.served import Served

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
