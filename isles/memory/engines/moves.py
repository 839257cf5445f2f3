"""How bytes move between the host and the device."""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn


class Moves:
    """Where both are the RAM: copies. Every call returns when its bytes are there."""

    def room(self) -> AbstractContextManager[object]:
        """Around making, or filling again, storages of the device."""
        return nullcontext()

    def fill(self, into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
        """Copy tensors of the host into those of the device, in the formats of these."""
        for target, own in zip(into, source, strict=True):
            target.copy_(own)

    def to_host(self, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Copies on the host, in these formats."""
        return [tensor.to("cpu", dtype, copy=True) for tensor, dtype in zip(tensors, dtypes, strict=True)]

    def to_device(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Copies on the device."""
        return [tensor.to(device, copy=True) for tensor in tensors]

    def place(self, hosted: Container[int], model: nn.Module) -> None:
        """The model's parameters with these ids are the host's; the rest, and its buffers, are the device's."""
