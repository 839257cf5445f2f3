"""Random numbers as pure functions of their key: the same key gives the same number in any order, process or thread.

A generator with a state would make a message's jitter depend on how many were drawn before it, hence on the order of
threads and on where a run was resumed. A hash of (seed, source, target, number) depends on nothing else.
"""

from __future__ import annotations

import math
from statistics import NormalDist

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, SplitMix64's increment
_NORMAL = NormalDist()


def hash64(*key: int) -> int:
    """A 64-bit hash of a sequence of integers, in order; sequences of different lengths do not collide by padding.

    Each integer is absorbed by SplitMix64's increment and finaliser, a bijection of 64 bits.
    """
    state = len(key)
    for part in key:
        state = _absorbed(state, part)
    return state


def _absorbed(state: int, part: int) -> int:
    state = ((state ^ (part & _MASK)) + _GOLDEN) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def uniform(*key: int) -> float:
    """A number in the open interval (0, 1) from `key`; 52 bits, so that neither end is ever reached by rounding."""
    return _unit(hash64(*key))


def lognormal(sigma: float, *key: int) -> float:
    """A factor exp(sigma z - sigma²/2), z standard normal from `key`; exactly 1.0 for sigma = 0.

    Mean-preserving: its expectation is 1 for every sigma, so that more jitter spreads times without making them
    longer on average. Its median is exp(-sigma²/2).
    """
    return LognormalSeries(sigma, *key[:-1])[key[-1]]


class LognormalSeries:
    """`lognormal(sigma, *key, number)` of one key for many numbers."""

    __slots__ = ("_shift", "_sigma", "_state")

    def __init__(self, sigma: float, *key: int) -> None:
        self._sigma, self._shift, self._state = sigma, 0.5 * sigma * sigma, len(key) + 1
        for part in key:
            self._state = _absorbed(self._state, part)

    def __getitem__(self, number: int) -> float:
        if self._sigma == 0.0:
            return 1.0
        return math.exp(self._sigma * _NORMAL.inv_cdf(_unit(_absorbed(self._state, number))) - self._shift)


def _unit(hashed: int) -> float:
    return ((hashed >> 12) + 0.5) * 2.0**-52
