"""The coordinates of a stream that lies in a subspace: see `isles.models.subspace`.

    forward     c = (x - table[token]) U      backward    dL/dc = (dL/dx) U

Both ways nothing is lost that a parameter could feel, where everything before the boundary writes into the subspace.
"""

from __future__ import annotations

from torch import Tensor

from isles.models.subspace import Subspace
from isles.pipeline.boundaries.base import Boundary
from isles.pipeline.boundaries.grassmann import Drift


class Coordinates(Boundary):
    """K numbers a token. drift: told of each gradient of the stream that comes out, before it is cut to K numbers."""

    def __init__(self, subspace: Subspace, drift: Drift | None = None) -> None:
        self.subspace, self.drift = subspace, drift

    def encode(self, x_BTD: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.subspace.coordinates(x_BTD, tokens[:, :-1]), None

    def decode(self, payload: Tensor, side: Tensor | None, tokens: Tensor) -> Tensor:
        x_BTD = self.subspace.stream(payload, tokens[:, :-1])
        if self.drift is not None and x_BTD.requires_grad:
            x_BTD.register_hook(self.drift.add)
        return x_BTD

    def sizes(self, sequences: int, length: int) -> tuple[tuple[int, ...], int]:
        return (sequences, length, self.subspace.rank), 0
