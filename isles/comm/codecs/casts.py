"""Codecs that only change the floating-point format."""

from __future__ import annotations

import torch
from torch import Tensor

from isles.comm.codecs.base import as_bytes
from isles.comm.codecs.blocks import scales_of, split_scaled


class Identity:
    """The entries as they are held: no copy, no loss."""

    name = "none"
    lossless = True
    block = 1

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return elements * dtype.itemsize

    def encode(self, x: Tensor) -> Tensor:
        return as_bytes(x)

    def decode(self, wire: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        return wire.view(dtype)


class BFloat16:
    """Round to bfloat16: 8 bits of mantissa, the range of float32. 2 bytes an entry, relative error at most 2**-8."""

    name = "bf16"
    lossless = False
    block = 1

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return 2 * elements

    def encode(self, x: Tensor) -> Tensor:
        return as_bytes(x.to(torch.bfloat16))

    def decode(self, wire: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        return wire.view(torch.bfloat16).to(dtype)


class Float16:
    """Round x / max|block| to float16, one float32 scale per 4096 entries: 2 bytes an entry + 4 a block.

    Unscaled float16 would flush a quarter of the entries of a small outer gradient (~1e-7) to zero.
    """

    name = "fp16"
    lossless = False
    block = 4096

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return 2 * elements + 4 * -(-elements // self.block)

    def encode(self, x: Tensor) -> Tensor:
        scales, scaled = split_scaled(x, self.block, 1.0)
        return torch.cat((as_bytes(scales), as_bytes(scaled.to(torch.float16).reshape(-1)[: x.numel()])))

    def decode(self, wire: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        scales, codes = scales_of(wire, elements, self.block)
        # The scales' bytes are a multiple of 4 at the front, so this view of float16 is always aligned.
        entries = codes.view(torch.float16).to(dtype)
        return entries * scales.to(dtype).repeat_interleave(self.block)[:elements]
