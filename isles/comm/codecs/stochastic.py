"""int8 and int4 that round up or down at random, up with the probability of what is cut off: unbiased, so the mean of
many is right without error feedback, at a little more error each.

    code = floor(x / s + u),  u uniform in [0, 1), another one for every entry, exchange and worker

u comes from no random number generator: it is a hash of the entry's own bits, its place in its block and a seed, so it
is the same however a vector is cut into messages, and nobody's generator moves (data order and dropout stay those of a
run without compression).
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from isles.comm.codecs.base import Codec
from isles.comm.codecs.integers import Int4, Int8, Uniform

_PLACES, _FIRST, _SECOND = (constant - (1 << 32) for constant in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))


def draws(y: Tensor, block: int, seed: int) -> Tensor:
    """Numbers in [0, 1) for float32 y (n,), whole blocks: uniform over seeds for every entry (murmur3's finalizer)."""
    places = torch.arange(block, dtype=torch.int32, device="cpu") * _PLACES + seed
    h = y.view(torch.int32).view(-1, block) ^ places
    h ^= (h >> 16) & 0xFFFF  # torch shifts signs in: they are masked off
    h *= _FIRST
    h ^= (h >> 13) & 0x7FFFF
    h *= _SECOND
    h ^= (h >> 16) & 0xFFFF
    return (h & 0xFFFFFF).view(-1).to(torch.float32).mul_(2.0**-24)


def private_seed(salt: int, member: int) -> int:
    """A 31-bit seed of one exchange and one worker."""
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
    """Int8 whose rounding is drawn."""

    name = "int8:stochastic"


class StochasticInt4(_Stochastic, Int4):
    """Int4 whose rounding is drawn."""

    name = "int4:stochastic"
