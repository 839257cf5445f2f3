"""Stochastic rounding without a random number generator: draws that are a hash of what is rounded.

A draw depends on the entry's own bits, its place in its block and a seed, so it is the same however a vector is cut
into messages, and nobody's generator moves (data order and dropout stay those of a run without compression).
"""

from __future__ import annotations

import torch
from torch import Tensor

_PLACES, _FIRST, _SECOND = (constant - (1 << 32) for constant in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))


def draws(y: Tensor, block: int, seed: int) -> Tensor:
    """Numbers in [0, 1) for float32 y (n,), whole blocks: uniform over seeds for every entry (murmur3's finalizer)."""
    places = torch.arange(block, dtype=torch.int32) * _PLACES + seed
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
