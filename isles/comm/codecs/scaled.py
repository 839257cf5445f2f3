"""Codecs of blocks that share one scale (`ScaledBlocks`: the layout on the wire, and the loop over pieces that fit in
cache), codecs that only change the floating-point format, and the sign.

Wire: float32 scales of all blocks, then the packed entries, `bits` each; zeros fill the last byte. bits per entry =
bits + 32/block. A block with a non-finite entry decodes to non-finite values, so the receiver notices it instead of
averaging it.

`Sign` sends one bit per entry: the sign. It decodes to the sign times the block's mean magnitude (Karimireddy et al.,
2019, arXiv 1901.09847):

    s = mean|x| over the block;  decoded = +s where x >= 0, else -s

Biased: train with error feedback. Bits are packed from the lowest up; 1.125 bits per entry.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from isles.comm.codecs.base import Codec, as_bytes

_PIECE = 1 << 17  # entries processed at a time: they and their temporaries stay in the second-level cache
_SMALLEST = torch.finfo(torch.float32).tiny


class ScaledBlocks(Codec):
    """Base of the codecs that send `bits` per entry and one float32 scale per block.

        s = max|x| / top over the block, at least 2**-126

    So an entry divided by its scale exceeds `top` by no more than rounding, and blocks of zeros are no special case.
    """

    bits: int
    top = 1.0

    def scale(self, sizes_KB: Tensor, out: Tensor) -> None:
        """Write the blocks' scales into `out` (K, 1), from their entries' |x|. A block with a NaN has the scale NaN."""
        torch.amax(sizes_KB, dim=1, keepdim=True, out=out)
        out.div_(self.top).clamp_min_(_SMALLEST)

    @abstractmethod
    def pack(self, y: Tensor, out: Tensor) -> None:
        """Write the codes of y into flat uint8 `out`, and drop padding of the last block that does not fit.
        y: entries divided by their scale, flat float32; may be overwritten.
        """

    @abstractmethod
    def unpack(self, codes: Tensor, out: Tensor) -> None:
        """Decode `codes` (c,) into flat float32 `out` (8 c / bits,): the entries divided by their scale."""

    @override
    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return 4 * -(-elements // self.block) + -(-elements * self.bits // 8)

    @override
    def encode(self, x: Tensor) -> Tensor:
        wire = torch.empty(self.wire_bytes(len(x), x.dtype), dtype=torch.uint8, device="cpu")
        buffer, y_KB = self._room(torch.Size((0, 0)))
        for part, scale_K1, codes in self._pieces(x, wire):
            if y_KB.shape != part.shape:
                buffer, y_KB = self._room(part.shape)
            x_KB = part.to(torch.float32)
            self.scale(torch.abs(x_KB, out=y_KB), out=scale_K1)
            torch.mul(x_KB, scale_K1.reciprocal(), out=y_KB)  # twice as fast as a division
            self.pack(buffer, codes)
        return wire

    @override
    def decode(self, wire: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        self.refuse_other_length(wire, elements, dtype)  # before memory is allocated
        out = torch.empty(elements, dtype=dtype, device="cpu")
        self.decode_into(wire, out)
        return out

    @override
    def decode_into(self, wire: Tensor, out: Tensor) -> None:
        self.refuse_other_length(wire, len(out), out.dtype)
        buffer, y_KB = self._room(torch.Size((0, 0)))
        for part, scale_K1, codes in self._pieces(out, wire):
            if out.dtype is torch.float32 and part.shape[1] == self.block:  # in place, while the piece is in cache
                self.unpack(codes, part.view(-1))
                part.mul_(scale_K1)
                continue
            if y_KB.shape != part.shape:
                buffer, y_KB = self._room(part.shape)
            self.unpack(codes, buffer[: len(codes) * 8 // self.bits])
            torch.mul(y_KB, scale_K1, out=part)

    def _pieces(self, flat: Tensor, wire: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the flat entries in runs of whole blocks (K, B), with their blocks' scales (K, 1) and their codes. A
        short last block is a piece of its own, (1, b).
        """
        block, whole = self.block, len(flat) // self.block * self.block
        runs = flat[:whole].view(-1, block).split(max(_PIECE // block, 1)) if whole else ()
        pieces = [*runs, flat[whole:].view(1, -1)] if whole < len(flat) else runs
        blocks = sum(map(len, pieces))
        scales = wire[: 4 * blocks].view(torch.float32).view(-1, 1).split([len(piece) for piece in pieces])
        codes = wire[4 * blocks :].split([-(-piece.numel() * self.bits // 8) for piece in pieces])
        return zip(pieces, scales, codes, strict=True)

    def _room(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Allocate the float32 temporary of a piece: the flat buffer of whole blocks, padded with zeros, and a view of
        it with the piece's shape. All pieces of a shape share it: allocating costs more than the arithmetic.
        """
        buffer = torch.zeros(shape[0] * self.block, dtype=torch.float32, device="cpu")
        return buffer, buffer[: shape.numel()].view(shape)


class Identity(Codec):
    """The entries in their own format: no copy, no loss."""

    name = "none"

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return elements * dtype.itemsize

    def encode(self, x: Tensor) -> Tensor:
        return as_bytes(x)

    def decode(self, wire: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        self.refuse_other_length(wire, elements, dtype)
        return wire.view(dtype)


class BFloat16(Codec):
    """Round to bfloat16: 8 bits of mantissa, the range of float32. 2 bytes per entry, relative error at most 2**-8."""

    name = "bf16"

    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return 2 * elements

    def encode(self, x: Tensor) -> Tensor:
        return as_bytes(x.to(torch.bfloat16))

    def decode(self, wire: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        self.refuse_other_length(wire, elements, dtype)
        return wire.view(torch.bfloat16).to(dtype)


class Float16(ScaledBlocks):
    """Round x / max|block| to float16, one float32 scale per 4096 entries: 16.008 bits per entry.

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


_EIGHTS = 1.0 - 2.0 * (np.arange(256)[:, None] >> np.arange(8) & 1).astype(np.float32)


class Sign(ScaledBlocks):
    """Signs times the block's mean magnitude. A mean is returned to the senders as bfloat16."""

    name = "sign"
    block = 256
    bits = 1

    @property
    @override
    def back(self) -> Codec:
        return BFloat16()

    @override
    def scale(self, sizes_KB: Tensor, out: Tensor) -> None:
        torch.mean(sizes_KB, dim=1, keepdim=True, out=out)  # 0 for zeros: 0 / 0 counts as x >= 0

    @override
    def pack(self, y: Tensor, out: Tensor) -> None:
        out.copy_(torch.from_numpy(np.packbits((y < 0).numpy(), bitorder="little"))[: len(out)])

    @override
    def unpack(self, codes: Tensor, out: Tensor) -> None:
        np.take(_EIGHTS, codes.numpy(), axis=0, out=out.numpy().reshape(-1, 8), mode="clip")
