"""Uniform quantisation in blocks that share one scale.

    s = max|x| / q over the block (1 where the block is zero);  code = round(x / s) in -q..q;  decoded = s * code

q = 127 for int8, 7 for int4. |x - decoded| <= s/2. int4: two codes a byte, plus 8, the first in the low half.

int2: four levels, -3/2, -1/2, 1/2, 3/2 of s = 3/2 of the block's root mean square: bins of equal width over three
standard deviations to each side. |x - decoded| <= s/2 for |x| <= 2 s, beyond that it is clipped. Four codes a byte, the
first in the lowest bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from isles.comm.codecs.scaled import ScaledBlocks, largest


class Int8(ScaledBlocks):
    """8-bit codes, one scale per 256 entries: 8.125 bits an entry."""

    name = "int8"
    block = 256
    bits = 8

    def scale(self, x_KB: Tensor) -> Tensor:
        """See ScaledBlocks.scale."""
        return largest(x_KB) / 127

    def pack(self, y_KB: Tensor) -> Tensor:
        """See ScaledBlocks.pack."""
        return y_KB.round_().clamp_(-127, 127).to(torch.int8).view(-1).view(torch.uint8)

    def unpack(self, codes: Tensor) -> Tensor:
        """See ScaledBlocks.unpack."""
        return codes.view(torch.int8).to(torch.float32)


class Int4(ScaledBlocks):
    """4-bit codes, one scale per 64 entries: 4.5 bits an entry."""

    name = "int4"
    block = 64
    bits = 4

    def scale(self, x_KB: Tensor) -> Tensor:
        """See ScaledBlocks.scale."""
        return largest(x_KB) / 7

    def pack(self, y_KB: Tensor) -> Tensor:
        """See ScaledBlocks.pack."""
        return pack_halves(y_KB.round_().clamp_(-7, 7).add_(8).to(torch.uint8).view(-1))

    def unpack(self, codes: Tensor) -> Tensor:
        """See ScaledBlocks.unpack."""
        return unpack_halves(codes, _PAIRS)


class Int2(ScaledBlocks):
    """2-bit codes, one scale per 64 entries: 2.5 bits an entry. Biased: train with error feedback."""

    name = "int2"
    block = 64
    bits = 2

    def scale(self, x_KB: Tensor) -> Tensor:
        """See ScaledBlocks.scale."""
        return 1.5 * x_KB.square().mean(dim=1).sqrt()

    def pack(self, y_KB: Tensor) -> Tensor:
        """See ScaledBlocks.pack."""
        codes = y_KB.floor_().clamp_(-2, 1).add_(2).to(torch.uint8).view(-1, 4)
        return codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6

    def unpack(self, codes: Tensor) -> Tensor:
        """See ScaledBlocks.unpack."""
        return torch.from_numpy(np.take(_FOURS, codes.numpy(), axis=0)).view(-1)


def pack_halves(codes: Tensor) -> Tensor:
    """uint8 codes below 16 (2 n,) -> two a byte (n,), the first in the low half."""
    pairs = codes.view(torch.int16)  # second << 8 | first on the little-endian machines that torch runs on
    return (pairs | (pairs >> 4)).to(torch.uint8)


def pairs_of(values: list[float]) -> np.ndarray:
    """The table by which `unpack_halves` decodes: for each byte the values of its two codes, as one 8-byte entry."""
    both = [[values[byte & 15], values[byte >> 4]] for byte in range(256)]
    return np.ascontiguousarray(np.array(both, dtype=np.float32)).view(np.float64).reshape(256)


def unpack_halves(codes: Tensor, table: np.ndarray) -> Tensor:
    """Bytes (n,) -> float32 values of their codes (2 n,). One look-up decodes two: many times faster than torch's
    indexing.
    """
    return torch.from_numpy(np.take(table, codes.numpy()).view(np.float32))


_PAIRS = pairs_of([float(code - 8) for code in range(16)])
_FOURS = np.array([[(byte >> 2 * place & 3) - 1.5 for place in range(4)] for byte in range(256)], dtype=np.float32)
