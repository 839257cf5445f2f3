"""Uniform quantisation in blocks that share one scale.

    s = max|x| / q over the block, at least 2**-126;  code = round(x / s) in -q..q;  decoded = s * code

q = 127 for int8, 7 for int4. |x - decoded| <= s/2. int4: two codes a byte, plus 8, the first in the low half.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from isles.comm.codecs.scaled import ScaledBlocks


class Int8(ScaledBlocks):
    """8-bit codes, one scale per 256 entries: 8.125 bits an entry."""

    name = "int8"
    block = 256
    bits = 8
    top = 127

    def pack(self, y: Tensor, out: Tensor) -> None:
        """See ScaledBlocks.pack."""
        out.view(torch.int8).copy_(y.round_()[: len(out)])

    def unpack(self, codes: Tensor, out: Tensor) -> None:
        """See ScaledBlocks.unpack."""
        out.copy_(codes.view(torch.int8))


class Int4(ScaledBlocks):
    """4-bit codes, one scale per 64 entries: 4.5 bits an entry."""

    name = "int4"
    block = 64
    bits = 4
    top = 7

    def pack(self, y: Tensor, out: Tensor) -> None:
        """See ScaledBlocks.pack."""
        pack_halves(y.round_().add_(8).to(torch.uint8), out)

    def unpack(self, codes: Tensor, out: Tensor) -> None:
        """See ScaledBlocks.unpack."""
        unpack_halves(codes, _PAIRS, out)


def pack_halves(codes: Tensor, out: Tensor) -> None:
    """uint8 codes below 16 (2 n,) -> two a byte, the first in the low half; as many as fit into `out` (n or less)."""
    pairs = codes.view(torch.int16)[: len(out)]  # second << 8 | first on the little-endian machines that torch runs on
    out.copy_(pairs | (pairs >> 4))


def pairs_of(values: list[float]) -> np.ndarray:
    """The table by which `unpack_halves` decodes: for each byte the values of its two codes, as one 8-byte entry."""
    both = [[values[byte & 15], values[byte >> 4]] for byte in range(256)]
    return np.ascontiguousarray(np.array(both, dtype=np.float32)).view(np.float64).reshape(256)


def unpack_halves(codes: Tensor, table: np.ndarray, out: Tensor) -> None:
    """Bytes (n,) -> float32 values of their codes, into `out` (2 n,). One look-up decodes two: many times faster than
    torch's indexing.
    """
    np.take(table, codes.numpy(), out=out.numpy().view(np.float64), mode="clip")  # other modes go through a copy


_PAIRS = pairs_of([float(code - 8) for code in range(16)])
