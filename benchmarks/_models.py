"""Models to measure with, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """x + W2 gelu(W1 norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def byte_model(width: int = 384, layers: int = 8) -> nn.Module:
    """The feed-forward half of a byte-level transformer: 9.7 M parameters as it stands."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(256, width),
        *(Residual(width) for _ in range(layers)),
        nn.LayerNorm(width),
        nn.Linear(width, 256),
    )


class Weights(nn.Module):
    """Parameters shaped like those of a decoder of `parameters` entries: some large matrices, many small vectors."""

    def __init__(self, parameters: int, width: int = 768) -> None:
        super().__init__()
        shapes: list[tuple[int, ...]] = []
        layer = [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (4 * width,)]
        layer += [(width, 4 * width), (width,), (width,), (width,), (width,), (width,)]
        elements = sum(torch.Size(shape).numel() for shape in layer)
        vocabulary = max(parameters // 4 // width, 1)
        shapes.append((vocabulary, width))
        shapes += layer * max(round((parameters - vocabulary * width) / elements), 1)
        generator = torch.Generator().manual_seed(0)
        self.all = nn.ParameterList(nn.Parameter(torch.randn(s, generator=generator) * 0.02) for s in shapes)
        self.numel = sum(parameter.numel() for parameter in self.all)
