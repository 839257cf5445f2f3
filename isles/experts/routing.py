"""Routing by prefix: which expert a sequence belongs to, from the first tokens alone."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from isles.experts.assignment import assign
from isles.experts.served import Served

_STEP = 1 / 4096  # nats: a 16-bit score reaches 16 nats a token


def prefix_scores(routers: Served, tokens: Tensor, prefix: int) -> Tensor:
    """(E, N): log-likelihood of the first `prefix` tokens of (N, T) behind the first one, under each router; a shorter
    sequence is read whole. ValueError where nothing is left to score.
    """
    length = min(prefix, tokens.shape[1])
    if length < 2:
        raise ValueError("routing needs a prompt of at least 2 tokens: give a longer one")
    return routers.scores(tokens[:, :length]).sum(-1)


def route(routers: Served, tokens: Tensor, prefix: int) -> Tensor:
    """(N,) the expert of each sequence, the lower number where two score the same."""
    return torch.from_numpy(assign(prefix_scores(routers, tokens, prefix).T.numpy(), "unbalanced"))


def to_wire(mean_N: Tensor) -> Tensor:
    """Mean log-probabilities a token (N,) as 16-bit fixed point, uint8 (2 N,): -score in steps of 1/4096 nat."""
    steps = (-mean_N.double() / _STEP).round().clamp(0, 65535).to(torch.int64).numpy().astype("<u2")
    return torch.from_numpy(steps.view(np.uint8).copy())


def from_wire(wire: Tensor) -> np.ndarray:
    """(N,) float64 of `to_wire`, the same on every machine."""
    return -wire.numpy().view("<u2").astype(np.float64) * _STEP
