"""int8 and int4 that round up or down at random, up with the probability of what is cut off: unbiased, so the mean of
many is right without error feedback, at a little more error each.

    code = floor(x / s + u),  u uniform in [0, 1), another one for every entry, exchange and worker
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from isles.comm.codecs.base import Codec
from isles.comm.codecs.dither import draws, private_seed
from isles.comm.codecs.integers import Int4, Int8, Uniform


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
