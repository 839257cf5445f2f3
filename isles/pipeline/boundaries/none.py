"""The stream itself: what leaves a stage is what the next one reads."""

from __future__ import annotations

from torch import Tensor

from isles.pipeline.boundaries.base import Boundary


class FullStream(Boundary):
    """The stream (B, T, D) as it is."""

    def __init__(self, width: int) -> None:
        self.width = width

    def encode(self, x_BTD: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return x_BTD, None

    def decode(self, payload: Tensor, side: Tensor | None, tokens: Tensor) -> Tensor:
        return payload

    def sizes(self, sequences: int, length: int) -> tuple[tuple[int, ...], int]:
        return (sequences, length, self.width), 0
