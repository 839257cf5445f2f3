"""Learned boundaries (SWARM, arXiv 2301.11913): a layer at the sender narrows the stream, a layer at the receiver
widens it again.

    bottleneck    W2 norm(W1 norm(x))                          W1 (R, D), W2 (D, R)
    maxout        W2 norm(largest of each D/R neighbours of norm(x))
                          ^ the payload, R numbers per token

norm: layer norm with gain and bias. They are part of the model: `leaving` of the block before the boundary, `entering`
of the block after it. Nothing else of the stream crosses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from isles.base.modes import generator_of
from isles.pipeline.boundaries.base import Boundary

LearnedKind = Literal["bottleneck", "maxout"]


class Narrow(nn.Module):
    """(..., D) to (..., R)."""

    def __init__(self, kind: LearnedKind, width: int, rank: int, like: Tensor) -> None:
        super().__init__()
        self.rank = rank
        self.norm = _norm(width, like)
        self.weight = nn.Parameter(like.new_empty(rank, width)) if kind == "bottleneck" else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.weight is not None:
            return nn.functional.linear(x, self.weight)
        return x.unflatten(-1, (self.rank, -1)).amax(-1)


class Wide(nn.Module):
    """(..., R) to (..., D)."""

    def __init__(self, width: int, rank: int, like: Tensor) -> None:
        super().__init__()
        self.norm = _norm(rank, like)
        self.weight = nn.Parameter(like.new_empty(width, rank))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(x), self.weight)


class Learned(Boundary):
    """Sends R numbers per token, between the first and the last block of a stage and its neighbours."""

    def __init__(self, rank: int, entering: nn.Module | None, leaving: nn.Module | None) -> None:
        self.rank, self.entering, self.leaving = rank, entering, leaving

    def encode(self, x_BTD: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        assert self.leaving is not None
        return self.leaving(x_BTD), None

    def decode(self, payload: Tensor, side: Tensor | None, tokens: Tensor) -> Tensor:
        assert self.entering is not None
        return self.entering(payload)

    def sizes(self, sequences: int, length: int) -> tuple[tuple[int, ...], int]:
        return (sequences, length, self.rank), 0


def attach(model: Any, cuts: Sequence[int], kind: LearnedKind, width: int, rank: int, seed: int) -> None:
    """Add the layers of the boundaries before blocks `cuts` to `model`, a whole one or a stage."""
    for name, block in cast(nn.Module, model.blocks).named_children():
        number, like = int(name), next(block.parameters()).detach()
        if number + 1 in cuts:
            block.leaving = _drawn(Narrow(kind, width, rank, like), f"{seed} {name}.leaving", width**-0.5)
        if number in cuts:  # the stream begins as large as the embedding's
            block.entering = _drawn(Wide(width, rank, like), f"{seed} {name}.entering", (rank * width) ** -0.5)


@torch.no_grad()
def _drawn(module: nn.Module, seed: str, std: float) -> nn.Module:
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2 and not parameter.is_meta:
            drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            parameter.copy_(drawn.normal_(std=std, generator=generator_of(f"{seed}.{name}")))
    return module


def _norm(width: int, like: Tensor) -> nn.LayerNorm:
    return nn.LayerNorm(width, device=like.device, dtype=like.dtype)
