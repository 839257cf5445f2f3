"""Whether a payload is finite, checked block by block while each block is in cache."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override


class FiniteCheck:
    """Takes the blocks of one payload one after the other, then says whether all of it was finite."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def take(self, part: Tensor) -> None:
        """The next block (b,)."""
        self._sums.append(part.sum())  # not finite if an entry is not

    @property
    def is_usable(self) -> bool:
        """Whether all entries were finite, and so were the sums of blocks: one that overflows counts as not finite."""
        return not self._sums or bool(torch.stack(self._sums).isfinite().all())


class NoCheck(FiniteCheck):
    """Where the payload is finite for sure, or reaches nobody else."""

    @override
    def take(self, part: Tensor) -> None:
        """Nothing is read."""
