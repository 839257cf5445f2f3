"""What the anchor does to the live weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Replace:
    """live = anchor: the next inner steps start from the anchor."""

    def land(self, live: list[Tensor], anchor: list[Tensor]) -> None:
        """See Landing.land."""
        torch._foreach_copy_(live, anchor)
