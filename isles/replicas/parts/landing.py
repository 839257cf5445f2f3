"""What the anchor does to the live weights, which may be in another format than anchor and reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Replace:
    """live = anchor: the next inner steps start from the anchor."""

    moves_reference: bool = False
    kept: float | None = 0.0
    name: ClassVar[str] = "replace"

    def land(self, live: list[Tensor], anchor: list[Tensor], reference: list[Tensor]) -> None:
        torch._foreach_copy_(live, anchor)


@dataclass(frozen=True, slots=True)
class Blend:
    """live = alpha live + (1 - alpha) anchor: local progress since the sending is partly kept (Streaming DiLoCo, arXiv
    2501.18512, Algorithm 2). alpha = 1: the anchor is never landed on.
    """

    kept: float  # alpha
    moves_reference: bool = False
    name: ClassVar[str] = "blend"

    def land(self, live: list[Tensor], anchor: list[Tensor], reference: list[Tensor]) -> None:
        torch._foreach_lerp_(live, [a.to(x) for a, x in zip(anchor, live, strict=True)], 1 - self.kept)


@dataclass(frozen=True, slots=True)
class Carry:
    """live = anchor - (reference - live): the own progress that is not averaged yet is carried over (DiLoCoX, arXiv
    2506.21263, overlap by one round; the reading in which every outer gradient enters once). The reference, what the
    live weights were when they landed, moves with them.
    """

    moves_reference: bool = True
    kept: float | None = None
    name: ClassVar[str] = "carry"

    def land(self, live: list[Tensor], anchor: list[Tensor], reference: list[Tensor]) -> None:
        progress = torch._foreach_sub(reference, [x.to(r) for x, r in zip(live, reference, strict=True)])
        landed = torch._foreach_sub(anchor, progress)
        torch._foreach_copy_(live, landed)
        # What the live weights are now, in their format.
        torch._foreach_copy_(reference, [new.to(x.dtype) for new, x in zip(landed, live, strict=True)])
