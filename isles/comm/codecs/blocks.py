"""Uniform quantisation in blocks that share one scale.

    s = max|x| / 127 over the block (1 where the block is zero);  code = round(x / s);  decoded = s * code

Wire: float32 scales of all blocks, then one int8 code an entry. bits per entry = 8 + 32/block; |x - decoded| <= s/2.
A block with a non-finite entry decodes to NaN, so that it is noticed and not averaged away.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isles.comm.codecs.base import as_bytes


def split_scaled(x: Tensor, block: int, levels: float) -> tuple[Tensor, Tensor]:
    """Flat x (n,) -> float32 scales (ceil(n/block),) and x / scale as (ceil(n/block), block), the last block
    zero-padded.
    """
    short = -x.numel() % block
    x_KB = (torch.nn.functional.pad(x, (0, short)) if short else x).reshape(-1, block)
    scales_K = (x_KB.abs().amax(dim=1) / levels).to(torch.float32) if x.numel() else x.new_zeros(0, dtype=torch.float32)
    scales_K = torch.where(scales_K == 0, 1.0, scales_K)
    return scales_K, x_KB / scales_K.to(x.dtype)[:, None]


def scales_of(wire: Tensor, elements: int, block: int) -> tuple[Tensor, Tensor]:
    """The float32 scales at the front of a wire buffer, and the bytes of the codes behind them."""
    count = -(-elements // block)
    return wire[: 4 * count].view(torch.float32), wire[4 * count :]


class Int8:
    """8-bit codes, one float32 scale per 256 entries: 8.125 bits an entry."""

    name = "int8"
    lossless = False
    block = 256

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return elements + 4 * -(-elements // self.block)

    def encode(self, x: Tensor) -> Tensor:
        scales, scaled = split_scaled(x, self.block, 127.0)
        codes = scaled.round_().clamp_(-127, 127).to(torch.int8).reshape(-1)
        return torch.cat((as_bytes(scales), as_bytes(codes[: x.numel()])))

    def decode(self, wire: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        scales, codes = scales_of(wire, elements, self.block)
        short = -elements % self.block
        entries = codes.view(torch.int8).to(dtype)
        entries_KB = (torch.nn.functional.pad(entries, (0, short)) if short else entries).reshape(-1, self.block)
        return (entries_KB * scales.to(dtype)[:, None]).reshape(-1)[:elements]
