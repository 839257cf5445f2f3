"""How large a model travels: bits of each codec's wire format with its scales, of DiLoCoX's low-rank factors, and of
DeMo's coefficients.

Low rank, r: an eighth of the width most matrices have, at least 1. A matrix (m, n) with 2 r (m + n) < m n travels as
two factors of at most r columns, m and n long, one exchange after the other, in int4; everything else beside the first
in int8.

Momentum: 32 coefficients of each block of a matrix, at most 64 x 64, bfloat16 with places of 12 bits; half of a
vector's entries with places of 8.

Units, IST's: of the MLPs' parameters each worker sends and gets its part with Adam's two moments, as the shards of a
mean travel; the mean of the rest goes beside them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from isles.network.job import Job, Matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """phases: bits a parameter of the model in each of the exchanges that follow each other. back: bits of an entry of
    the mean per bit of one sent. kept: bytes a parameter that stay from round to round.
    """

    phases: tuple[float, ...]
    back: float = 1.0
    kept: float = 0.0

    @property
    def bits(self) -> float:
        """A parameter."""
        return sum(self.phases)


_INT4, _INT8, _FP4 = 4 + 32 / 64, 8 + 32 / 256, 4 + 32 / 256  # a scale a block
_SPARSE = 64 / 4096 * (12 + 2 + 32 / 64)  # a place, a value, its share of a scale
FORMS = {
    "none": Form(phases=(32,)),
    "bf16": Form(phases=(16,)),
    "int8": Form(phases=(_INT8,)),
    "int4": Form(phases=(_INT4,)),
    "fp4": Form(phases=(_FP4,), back=16 / _FP4),
    "topk:64+int2": Form(phases=(_SPARSE,), back=32 / _SPARSE),
    "randk:0.005": Form(phases=(round(0.005 * 4096) / 4096 * 32,)),
}
LOW_RANK, MOMENTUM, UNITS = "low rank, int4", "momentum, bf16", "units"
_EDGE, _KEPT = 64, 32  # DeMo's


def form_of(codec: str, job: Job) -> Form:
    """Of a name in `FORMS`, or of `LOW_RANK`, `MOMENTUM` or `UNITS`."""
    made = {LOW_RANK: low_rank, MOMENTUM: momentum, UNITS: units}
    return made[codec](job) if codec in made else FORMS[codec]


def units(job: Job) -> Form:
    """See the module."""
    own = job.mlp_share / job.workers
    return Form(phases=(3 * 32 * own + 32 * (1 - job.mlp_share),), kept=3 * 4 * own)


def low_rank(job: Job) -> Form:
    """See the module."""
    matrices = job.known_matrices
    rank = _rank(matrices)
    first = second = 0.0
    dense = job.parameters
    for rows, columns, count in matrices:
        if 2 * rank * (rows + columns) < rows * columns:
            narrow = min(rank, rows, columns)
            first, second = first + count * rows * narrow, second + count * columns * narrow
            dense -= count * rows * columns
    per_parameter = 1 / job.parameters
    phases = (
        (_INT4 * first + _INT8 * max(dense, 0.0)) * per_parameter,
        _INT4 * second * per_parameter,
    )
    return Form(phases=phases if second else phases[:1], kept=4 * second * per_parameter)


def momentum(job: Job) -> Form:
    """See the module. Everyone's goes to everyone: there is no mean that could come back in one piece."""
    matrices = job.known_matrices
    blocks = sum(count * math.ceil(rows / _EDGE) * math.ceil(columns / _EDGE) for rows, columns, count in matrices)
    vectors = max(job.parameters - sum(rows * columns * count for rows, columns, count in matrices), 0.0)
    bits = blocks * _KEPT * (16 + 12) + vectors * _KEPT / _EDGE * (16 + 8)
    return Form(phases=(bits / job.parameters,), back=math.inf)


def _rank(matrices: Matrices) -> int:
    entries: Counter[float] = Counter()
    for rows, columns, count in matrices:
        entries[min(rows, columns)] += count * rows * columns  # type: ignore[assignment]
    return max(1, int(entries.most_common(1)[0][0] // 8)) if entries else 1
