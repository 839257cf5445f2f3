"""Codecs that only change the floating-point format."""

from __future__ import annotations

import torch
from torch import Tensor

from isles.comm.codecs.base import Codec, as_bytes


class Identity(Codec):
    """The entries as they are held: no copy, no loss."""

    name = "none"
    lossless, biased, shared_mask = True, False, False

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return elements * dtype.itemsize

    def encode(self, x: Tensor) -> Tensor:
        return as_bytes(x)

    def decode(self, wire: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        self.refuse_other_length(wire, elements, dtype)
        return wire.view(dtype)


class BFloat16(Codec):
    """Round to bfloat16: 8 bits of mantissa, the range of float32. 2 bytes an entry, relative error at most 2**-8."""

    name = "bf16"
    lossless, biased, shared_mask = False, False, False

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return 2 * elements

    def encode(self, x: Tensor) -> Tensor:
        return as_bytes(x.to(torch.bfloat16))

    def decode(self, wire: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        self.refuse_other_length(wire, elements, dtype)
        return wire.view(torch.bfloat16).to(dtype)
