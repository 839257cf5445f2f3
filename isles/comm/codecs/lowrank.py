"""Low-rank factors (PowerSGD, arXiv 1905.13727) as a form on the wire: the settings. `isles.comm.collectives.averaging`
averages the factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import prod
from typing import ClassVar

from torch import Tensor

from isles.comm.codecs.base import Codec
from isles.comm.codecs.integers import Int8
from isles.comm.codecs.kinds import KINDS
from isles.comm.codecs.scaled import Identity


@dataclass(frozen=True)
class LowRank:
    """Matrices travel as two factors of `rank` columns (PowerSGD, Vogels et al. 2019, arXiv 1905.13727). The codec
    `values` encodes the factors. This form is not a codec: it needs the tensors' shapes, keeps a basis from round to
    round, and exchanges in two phases.

    min_compression_rate: a tensor of shape (m, ...), viewed as a matrix (m, n), is compressed if
    rank (m + n) min_compression_rate < m n. Other tensors travel dense: encoded by `values` if that is exact or a cast,
    else as int8. start: number of rounds at the start that travel dense. adapts: the rank changes from round to round,
    so members agree on the lengths before they receive.
    """

    rank: int
    _: KW_ONLY
    values: Codec = field(default_factory=Identity)
    min_compression_rate: float = 2.0
    start: int = 0
    adapts: bool = False
    lossless: ClassVar[bool] = KINDS["powersgd"].lossless
    biased: ClassVar[bool] = KINDS["powersgd"].biased
    shared_mask: ClassVar[bool] = KINDS["powersgd"].shared_mask

    @property
    def name(self) -> str:
        return f"powersgd:{self.rank}" + ("" if isinstance(self.values, Identity) else f"+{self.values.name}")

    @property
    def dense(self) -> Codec:
        """The codec of tensors that are not compressed."""
        return self.values if self.values.name in ("none", "bf16", "fp16") else Int8()

    def compresses(self, tensors: Iterable[Tensor]) -> bool:
        return any(self.matrix(tensor.shape) is not None for tensor in tensors)

    def matrix(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Rows and columns for compressing a tensor of `shape`; None if it travels dense."""
        if len(shape) < 2 or 0 in shape:
            return None
        rows, columns = shape[0], prod(shape[1:])
        return (rows, columns) if self.rank * (rows + columns) * self.min_compression_rate < rows * columns else None


Form = Codec | LowRank
"""A form in which a vector may be averaged if the shapes of its tensors are known."""
