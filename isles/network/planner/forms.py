"""How large a model travels: bits of each codec's wire format with its scales, and of what depends on its matrices.

Low rank, r: a matrix (m, n) with 2 r (m + n) < m n travels as two factors of at most r columns, m and n long, one
exchange after the other; everything else beside the first. DiLoCoX: r is an eighth of the width most matrices have, at
least 1; factors in int4, the rest in int8. powersgd:4: all in float32.

Largest entries (dct-dp): of every matrix of 4096 entries or more a hundredth, each a float32 and a place of 2 bytes,
and 4 bytes for 65,536 entries; everything else in float32; from everyone to everyone.

Momentum (demo): 32 coefficients of each block of a matrix, at most 64 x 64, bfloat16 with places of 12 bits; half of a
vector's entries with places of 8; from everyone to everyone.

Units (ist): of the MLPs' parameters each worker sends and gets its part with Adam's two moments, as the shards of a
mean travel; the mean of the rest goes beside them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from isles.network.planner.job import Job, Matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedForm:
    """phases: bits a parameter of the model in each of the exchanges that follow each other. beside: in one more,
    beside the first. back: bits of an entry of the mean per bit of one sent; inf: there is no mean that could come
    back in one piece. kept: bytes a parameter that stay from round to round. entries: of low rank, those of each
    of the phases and what is beside, a parameter of the model. first: the form of the first `dense` rounds.
    """

    phases: tuple[float, ...]
    beside: float = 0.0
    back: float = 1.0
    kept: float = 0.0
    entries: tuple[float, ...] = ()
    first: PlannedForm | None = None
    dense: int = 0

    @property
    def bits(self) -> float:
        """A parameter."""
        return sum(self.phases) + self.beside


_INT4, _INT8, _FP4 = 4 + 32 / 64, 8 + 32 / 256, 4 + 32 / 256  # a scale a block
_SPARSE = 64 / 4096 * (12 + 2 + 32 / 64)  # a place, a value, its share of a scale
_WHOLE = 4096  # entries under which dct-dp sends a tensor whole
_EDGE, _KEPT = 64, 32  # demo's blocks, and coefficients of each
FORMS = {
    "none": PlannedForm(phases=(32,)),
    "bf16": PlannedForm(phases=(16,)),
    "int8": PlannedForm(phases=(_INT8,)),
    "int4": PlannedForm(phases=(_INT4,)),
    "fp4": PlannedForm(phases=(_FP4,), back=16 / _FP4),
    "topk:64+int2": PlannedForm(phases=(_SPARSE,), back=32 / _SPARSE),
    "randk:0.005": PlannedForm(phases=(round(0.005 * 4096) / 4096 * 32,)),
}
LOW_RANK, RANK_4 = "low rank, int4", "powersgd:4"
LARGEST, MOMENTUM, UNITS = "largest hundredth", "momentum, bf16", "units"


def form_of(codec: str, job: Job) -> PlannedForm:
    """Of a name in `FORMS`, or of one of the constants above. KeyError for another."""
    return FORMS[codec] if codec in FORMS else _OF_JOB[codec](job)


def _dilocox(job: Job) -> PlannedForm:
    low = _low_rank(job, _rank(job.known_matrices), factor=_INT4, rest=_INT8)
    return replace(low, first=FORMS["int8"], dense=2) if len(low.phases) > 1 else low


def _powersgd(job: Job) -> PlannedForm:
    return _low_rank(job, 4, factor=32, rest=32)


def _low_rank(job: Job, rank: int, *, factor: float, rest: float) -> PlannedForm:
    """factor, rest: bits an entry of the factors, and of what is not compressed."""
    first = second = 0.0
    dense = job.parameters
    for rows, columns, count in job.known_matrices:
        if 2 * rank * (rows + columns) < rows * columns:
            narrow = min(rank, rows, columns)
            first, second = first + count * rows * narrow, second + count * columns * narrow
            dense -= count * rows * columns
    whole = rest * max(dense, 0.0) / job.parameters
    if not second:
        return PlannedForm(phases=(whole,))
    phases = (factor * first / job.parameters, factor * second / job.parameters)
    entries = tuple(max(number, 0.0) / job.parameters for number in (first, second, dense))
    return PlannedForm(phases=phases, beside=whole, kept=4 * second / job.parameters, entries=entries)


def _rank(matrices: Matrices) -> int:
    entries: Counter[float] = Counter()
    for rows, columns, count in matrices:
        entries[min(rows, columns)] += count * rows * columns  # type: ignore[assignment]
    return max(1, int(entries.most_common(1)[0][0] // 8)) if entries else 1


def _largest(job: Job) -> PlannedForm:
    sparse = sum(count * rows * columns for rows, columns, count in job.known_matrices if rows * columns >= _WHOLE)
    share = min(sparse / job.parameters, 1.0)
    return PlannedForm(phases=(share * 0.01 * (32 + 16) + (1 - share) * 32 + 32 / 65536,), back=math.inf)


def _momentum(job: Job) -> PlannedForm:
    matrices = job.known_matrices
    blocks = sum(count * math.ceil(rows / _EDGE) * math.ceil(columns / _EDGE) for rows, columns, count in matrices)
    vectors = max(job.parameters - sum(rows * columns * count for rows, columns, count in matrices), 0.0)
    bits = blocks * _KEPT * (16 + 12) + vectors * _KEPT / _EDGE * (16 + 8)
    return PlannedForm(phases=(bits / job.parameters,), back=math.inf)


def _units(job: Job) -> PlannedForm:
    own = job.mlp_share / job.workers
    return PlannedForm(phases=(3 * 32 * own + 32 * (1 - job.mlp_share),), kept=3 * 4 * own)


_OF_JOB: dict[str, Callable[[Job], PlannedForm]] = {
    LOW_RANK: _dilocox,
    RANK_4: _powersgd,
    LARGEST: _largest,
    MOMENTUM: _momentum,
    UNITS: _units,
}
