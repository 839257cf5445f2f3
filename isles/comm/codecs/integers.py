"""Codecs with a few bits per entry, in blocks that share one scale: int8, int4, int2 and fp4.

int8 and int4 quantise uniformly:

    s = max|x| / q over the block, at least 2**-126;  code = round(x / s) in -q..q;  decoded = s * code

q = 127 for int8, 7 for int4. |x - decoded| <= s/2. int4: two codes per byte, each plus 8, the first in the low half.

int2 has four levels: -3/2, -1/2, 1/2 and 3/2 times s, where s = 3/2 of the block's root mean square. The bins have
equal width and cover three standard deviations on each side. |x - decoded| <= s/2 for |x| <= 2 s; larger entries are
clipped. Four codes per byte, the first in the lowest bits.

Stochastic int8 and int4 round up or down at random; the fractional part is the probability of rounding up. So they are
unbiased: a mean of many is right without error feedback, though each encoding has a slightly larger error.

    code = floor(x / s + u),  u uniform in [0, 1), drawn for every entry, exchange and worker

u is a hash of the entry's own bits, its index in its block and a seed. So it does not depend on how a vector is split
into messages, and no random number generator advances (data order and dropout stay those of a run without
compression).

fp4 is 4-bit floating point without a mantissa, E3M0 (Streaming DiLoCo's wire format, arXiv 2501.18512, section 2.4):

    s = max|x| over the block, at least 2**-126;  decoded = 0 or +-s * 2**e, e = -6..0, the nearest to x

Rounding: |x|/s above 2**-7 never becomes zero. In (2**e, 2**(e+1)) it rounds up above 1.5 * 2**e; ties round down. The
relative error is at most 1/3 for |x| >= s * 2**-6. Code: sign in bit 3, then 0 for zero or e + 7. The paper gives no
scale rule; one float32 scale per 256 entries is the choice of Isles: 4.125 bits per entry.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from isles.comm.codecs.base import Codec
from isles.comm.codecs.scaled import BFloat16, ScaledBlocks


class Uniform(ScaledBlocks):
    """Base of int8 and int4. Subclasses pack the codes; the rounding is separate, so that it can be exchanged."""

    def rounded(self, y: Tensor) -> Tensor:
        """Round y (n,) to the nearest whole numbers, in place."""
        return y.round_()


class Int8(Uniform):
    """8-bit codes, one scale per 256 entries: 8.125 bits per entry."""

    name = "int8"
    block = 256
    bits = 8
    top = 127

    @override
    def pack(self, y: Tensor, out: Tensor) -> None:
        out.view(torch.int8).copy_(self.rounded(y)[: len(out)])

    @override
    def unpack(self, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes.view(torch.int8))


class Int4(Uniform):
    """4-bit codes, one scale per 64 entries: 4.5 bits per entry."""

    name = "int4"
    block = 64
    bits = 4
    top = 7

    @override
    def pack(self, y: Tensor, out: Tensor) -> None:
        pack_halves(self.rounded(y).add_(8).to(torch.uint8), out)

    @override
    def unpack(self, codes: Tensor, out: Tensor) -> None:
        unpack_halves(codes, _PAIRS, out)


class Int2(ScaledBlocks):
    """2-bit codes, one scale per 64 entries: 2.5 bits per entry. Biased: train with error feedback."""

    name = "int2"
    block = 64
    bits = 2

    @override
    def scale(self, sizes_KB: Tensor, out: Tensor) -> None:
        """Write 3/2 of the root mean square. It is computed relative to the largest entry, as squares may underflow."""
        super().scale(sizes_KB, out)
        out.mul_(sizes_KB.div_(out).square_().mean(dim=1, keepdim=True).sqrt_().mul_(1.5))

    @override
    def pack(self, y: Tensor, out: Tensor) -> None:
        codes = y.floor_().clamp_(-2, 1).nan_to_num_().add_(2).to(torch.uint8).view(-1, 4)[: len(out)]
        out.copy_(codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6)

    @override
    def unpack(self, codes: Tensor, out: Tensor) -> None:
        out.copy_(torch.from_numpy(np.take(_FOURS, codes.numpy(), axis=0)).view(-1)[: len(out)])


def pack_halves(codes: Tensor, out: Tensor) -> None:
    """Pack uint8 codes below 16 (2 n,), two per byte, the first in the low half, as far as `out` (n or less) lasts."""
    pairs = codes.view(torch.int16)[: len(out)]  # second << 8 | first on the little-endian machines that torch runs on
    out.copy_(pairs | (pairs >> 4))


def pairs_of(values: list[float]) -> np.ndarray:
    """Make the table of `unpack_halves`: for each byte, the values of its two codes as one 8-byte entry."""
    both = [[values[byte & 15], values[byte >> 4]] for byte in range(256)]
    return np.ascontiguousarray(np.array(both, dtype=np.float32)).view(np.float64).reshape(256)


def unpack_halves(codes: Tensor, table: np.ndarray, out: Tensor) -> None:
    """Write the float32 values of the codes in bytes (n,) into `out` (2 n,). One look-up decodes two codes."""
    np.take(table, codes.numpy(), out=out.numpy().view(np.float64), mode="clip")  # other modes go through a copy


_PAIRS = pairs_of([float(code - 8) for code in range(16)])
_FOURS = np.array([[(byte >> 2 * target & 3) - 1.5 for target in range(4)] for byte in range(256)], dtype=np.float32)


_POSITIONS, _FIRST, _SECOND = (constant - (1 << 32) for constant in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))


def draws(y: Tensor, block: int, seed: int) -> Tensor:
    """Numbers in [0, 1) for whole blocks of float32 y (n,), uniform over seeds for each entry (murmur3's finalizer)."""
    positions = torch.arange(block, dtype=torch.int32, device="cpu") * _POSITIONS + seed
    h = y.view(torch.int32).view(-1, block) ^ positions
    h ^= (h >> 16) & 0xFFFF  # torch's shift copies the sign bit: mask it off
    h *= _FIRST
    h ^= (h >> 13) & 0x7FFFF
    h *= _SECOND
    h ^= (h >> 16) & 0xFFFF
    return (h & 0xFFFFFF).view(-1).to(torch.float32).mul_(2.0**-24)


def private_seed(salt: int, member: int) -> int:
    """A 31-bit seed for one exchange and one worker."""
    return (salt * 0x9E3779B1 + member * 0xC2B2AE35 + 0x27D4EB2F) % (1 << 31)


class _Stochastic(Uniform):
    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    @override
    def salted(self, salt: int, member: int) -> Codec:
        return type(self)(private_seed(salt, member))

    @override
    def rounded(self, y: Tensor) -> Tensor:
        return y.add_(draws(y, self.block, self.seed)).floor_().clamp_(-self.top, self.top)


class StochasticInt8(_Stochastic, Int8):
    """Int8 with stochastic rounding."""

    name = "int8:stochastic"


class StochasticInt4(_Stochastic, Int4):
    """Int4 with stochastic rounding."""

    name = "int4:stochastic"


_FLOAT4_VALUES = [0.0, *(2.0 ** (code - 7) for code in range(1, 8))]
_FLOAT4_PAIRS = pairs_of([*_FLOAT4_VALUES, *(-value for value in _FLOAT4_VALUES)])


def _float4_codes() -> np.ndarray:
    """Codes indexed by the upper 12 bits (sign, exponent, 3 of the mantissa) of the float32 next below |x|/s."""
    codes = np.zeros(4096, dtype=np.uint8)
    for index in range(4096):
        exponent, half = (index >> 3 & 255) - 127, index >> 2 & 1
        if exponent >= -7:
            codes[index] = min(max(exponent + 7 + half, 1), 7) | (index >> 11) << 3
    codes[[2047, 4095]] = 0  # the integers just below -0 and 0
    return codes


_FLOAT4_CODES = _float4_codes()


class Float4(ScaledBlocks):
    """E3M0. A mean is returned to the senders as bfloat16."""

    name = "fp4"
    block = 256
    bits = 4

    @property
    @override
    def back(self) -> Codec:
        return BFloat16()

    @override
    def pack(self, y: Tensor, out: Tensor) -> None:
        below = y.view(torch.int32).sub_(1)  # the next float towards zero; zero becomes -1
        pack_halves(torch.from_numpy(np.take(_FLOAT4_CODES, (below >> 20).bitwise_and_(4095).numpy())), out)

    @override
    def unpack(self, codes: Tensor, out: Tensor) -> None:
        unpack_halves(codes, _FLOAT4_PAIRS, out)
