"""Whether what a worker is about to send is of use to anyone, looked at block by block while it is in cache."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override


class Look:
    """Takes the blocks of one payload; then says what is thought of all of it."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def take(self, part: Tensor) -> None:
        """The next block (b,)."""
        self._sums.append(part.sum())  # not finite if an entry is not

    @property
    def is_usable(self) -> bool:
        """Whether all entries are finite, and their sums are: an overflow of a sum counts as not finite."""
        return not self._sums or bool(torch.stack(self._sums).isfinite().all())


class NoLook(Look):
    """At what is finite for sure, or could harm nobody: in a world of one it is the inner optimizer's business."""

    @override
    def take(self, part: Tensor) -> None:
        """Nothing is read."""
