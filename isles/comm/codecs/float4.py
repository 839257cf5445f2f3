"""4-bit floating point without a mantissa, E3M0 (the wire format of Streaming DiLoCo, arXiv 2501.18512, section 2.4).

    s = max|x| over the block, at least 2**-126;  decoded = 0 or +-s * 2**e, e = -6..0, the nearest to x

Nearest: |x|/s above 2**-7 is never zero, and in (2**e, 2**(e+1)) it goes up above 1.5 * 2**e; ties go down. Relative
error at most 1/3 for |x| >= s * 2**-6. Code: sign in bit 3, then 0 for zero or e + 7. The paper names no scale rule:
one float32 scale per 256 entries is ours; 4.125 bits an entry.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from isles.comm.codecs.base import Codec
from isles.comm.codecs.integers import pack_halves, pairs_of, unpack_halves
from isles.comm.codecs.scaled import BFloat16, ScaledBlocks

_VALUES = [0.0, *(2.0 ** (code - 7) for code in range(1, 8))]
_PAIRS = pairs_of([*_VALUES, *(-value for value in _VALUES)])


def _code_table() -> np.ndarray:
    """Code by the upper 12 bits (sign, exponent, 3 of the mantissa) of a float32 just below |x|/s in magnitude."""
    codes = np.zeros(4096, dtype=np.uint8)
    for index in range(4096):
        exponent, half = (index >> 3 & 255) - 127, index >> 2 & 1
        if exponent >= -7:
            codes[index] = min(max(exponent + 7 + half, 1), 7) | (index >> 11) << 3
    codes[[2047, 4095]] = 0  # what is just below -0 and 0, as integers
    return codes


_CODES = _code_table()


class Float4(ScaledBlocks):
    """E3M0; the mean of several goes back as bfloat16."""

    name = "fp4"
    block = 256
    bits = 4

    @property
    @override
    def back(self) -> Codec:
        return BFloat16()

    @override
    def pack(self, y: Tensor, out: Tensor) -> None:
        below = y.view(torch.int32).sub_(1)  # the float next to y on the side of zero; zero becomes -1
        pack_halves(torch.from_numpy(np.take(_CODES, (below >> 20).bitwise_and_(4095).numpy())), out)

    @override
    def unpack(self, codes: Tensor, out: Tensor) -> None:
        unpack_halves(codes, _PAIRS, out)
