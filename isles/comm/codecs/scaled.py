"""Codecs of blocks that share one scale: the layout on the wire, and the loop over pieces that fit in cache.

Wire: float32 scales of all blocks, then `bits` an entry, packed; the last byte is filled with zeros. bits per entry =
bits + 32/block. A block with a non-finite entry decodes to something non-finite, so that it is noticed and not averaged
away.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from isles.comm.codecs.base import Codec

_PIECE = 1 << 15  # entries worked on at a time: their temporaries stay in the second-level cache


class ScaledBlocks(Codec):
    """Base of the codecs that send `bits` an entry and one float32 scale a block."""

    bits: int

    @abstractmethod
    def scale(self, x_KB: Tensor) -> Tensor:
        """The blocks' scales (K,); any value where the block is zero."""

    @abstractmethod
    def pack(self, y_KB: Tensor) -> Tensor:
        """Entries divided by their scale (float32, may be written to) -> codes, flat uint8 (K * B * bits / 8,)."""

    @abstractmethod
    def unpack(self, codes: Tensor) -> Tensor:
        """Codes (c,) -> entries divided by their scale, flat float32 (8 c / bits,), new memory."""

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """See Codec.wire_bytes."""
        return 4 * -(-elements // self.block) + -(-elements * self.bits // 8)

    def encode(self, x: Tensor) -> Tensor:
        """See Codec.encode."""
        elements, block = x.numel(), self.block
        wire = torch.empty(self.wire_bytes(elements, x.dtype), dtype=torch.uint8)
        scales, codes = _parts(wire, elements, block)
        for start in range(0, elements, self._piece):
            stop = min(start + self._piece, elements)
            entries = x[start:stop].to(torch.float32)
            short, whole = (start - stop) % block, (stop - start) // block
            scale = self.scale(entries[: whole * block].view(whole, block))
            if short:
                scale = torch.cat((scale, self.scale(entries[None, whole * block :])))
                entries = torch.nn.functional.pad(entries, (0, short))
            x_KB = entries.view(-1, block)
            scales[start // block : -(-stop // block)] = scale
            first, last = start * self.bits // 8, -(-stop * self.bits // 8)
            codes[first:last] = self.pack(x_KB / torch.where(scale == 0, 1.0, scale)[:, None])[: last - first]
        return wire

    def decode(self, wire: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        """See Codec.decode."""
        block = self.block
        out = torch.empty(elements, dtype=dtype)
        scales, codes = _parts(wire, elements, block)
        for start in range(0, elements, self._piece):
            stop = min(start + self._piece, elements)
            entries = self.unpack(codes[start * self.bits // 8 : -(-stop * self.bits // 8)])
            scale = scales[start // block : -(-stop // block)]
            whole = (stop - start) // block
            entries[: whole * block].view(whole, block).mul_(scale[:whole, None])
            if whole < len(scale):
                entries[whole * block :].mul_(scale[-1])
            out[start:stop] = entries[: stop - start]
        return out

    @property
    def _piece(self) -> int:
        return max(_PIECE // self.block, 1) * self.block


def _parts(wire: Tensor, elements: int, block: int) -> tuple[Tensor, Tensor]:
    """The float32 scales at the front of a wire buffer, and the bytes of the codes behind them."""
    count = -(-elements // block)
    return wire[: 4 * count].view(torch.float32), wire[4 * count :]


def largest(x_KB: Tensor) -> Tensor:
    """max|x| of each block (K,); NaN where an entry is."""
    return x_KB.abs().amax(dim=1)
