"""Codecs that only change the floating-point format, float16 with a scale."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from isles.comm.codecs.base import Codec, as_bytes
from isles.comm.codecs.scaled import ScaledBlocks


class Identity(Codec):
    """The entries as they are held: no copy, no loss."""

    name = "none"

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

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return 2 * elements

    def encode(self, x: Tensor) -> Tensor:
        return as_bytes(x.to(torch.bfloat16))

    def decode(self, wire: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        self.refuse_other_length(wire, elements, dtype)
        return wire.view(torch.bfloat16).to(dtype)


class Float16(ScaledBlocks):
    """Round x / max|block| to float16, one float32 scale per 4096 entries: 16.008 bits an entry.

    Unscaled float16 would flush a quarter of the entries of a small outer gradient (~1e-7) to zero.
    """

    name = "fp16"
    block = 4096
    bits = 16

    @override
    def pack(self, y: Tensor, out: Tensor) -> None:
        out.view(torch.float16).copy_(y[: len(out) // 2])

    @override
    def unpack(self, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes.view(torch.float16))
