"""The settings of DiLoCoX; the symbols are those of `dilocox` and `adaptive`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from isles.comm.codecs import CODECS, Form, codec
from isles.comm.codecs.lowrank import LowRank
from isles.replicas.checks import at_least, momentum_in_range, one_of, positive_rate
from isles.replicas.parts.feedback import Feedback, check_feedback
from isles.replicas.sync import MethodConfig


@dataclass(frozen=True, kw_only=True)
class DiLoCoXConfig(MethodConfig):
    """sync_every: inner steps of a round (H_1). outer_lr, outer_momentum: as in DiLoCo; lower the rate before the
    momentum. delay: what a round starts from while the last one's mean is under way: carry (the anchor and the own
    progress), restart (the anchor), none (it is waited for). rank: r_1; left out, an eighth of the width most matrices
    have; 0: no low rank. codec: form of the factors, or of everything with rank = 0. min_compression_rate: matrices
    that would not shrink by more travel dense; left out, 2. start_compress: so many rounds travel dense in 8 bits
    first; left out, 2. error_feedback, feedback_decay: as in DiLoCo. window: rounds over which the rank, and with it H,
    is adapted; left out, 5; 0: both stay. energy: part of the mean's square that the ranks are to hold, 0..1; left out,
    0.95.
    """

    sync_every: int = 125
    outer_lr: float = 0.4
    outer_momentum: float = 0.9
    delay: Literal["carry", "restart", "none"] = "carry"
    rank: int | None = None
    codec: str = "int4"
    min_compression_rate: float | None = None
    start_compress: int | None = None
    error_feedback: Feedback = "local"
    feedback_decay: float = 1.0
    window: int | None = None
    energy: float | None = None

    def __post_init__(self) -> None:
        at_least("sync_every", self.sync_every, 1)
        positive_rate(self.outer_lr)
        momentum_in_range(self.outer_momentum)
        one_of("delay", self.delay, ("carry", "restart", "none"))
        at_least("rank", self.rank or 0, 0)
        if codec(self.codec).name not in CODECS and self.rank != 0:
            raise ValueError(
                f"codec = {self.codec} leaves out entries of factors: choose one such as int4, or rank = 0"
            )
        check_feedback(self.error_feedback, self.feedback_decay)
        for key in ("start_compress", "window", "min_compression_rate", "energy"):
            value = getattr(self, key)
            at_least(key, value or 0, 0)
            if value and self.rank == 0:
                raise ValueError(f"{key} = {value} has no low rank to act on: leave it out, or leave out rank = 0")
        if self.energy is not None and self.window == 0:
            raise ValueError(f"energy = {self.energy} is of a rank that adapts: leave it out, or leave out window = 0")
        if not 0 < self.held <= 1:
            raise ValueError(f"energy = {self.energy}: choose a part above 0, up to 1, such as 0.95")

    @property
    def rounds_averaged(self) -> int:
        """window with its default."""
        return (0 if self.rank == 0 else 5) if self.window is None else self.window

    @property
    def held(self) -> float:
        """energy with its default."""
        return 0.95 if self.energy is None else self.energy

    def form(self, shapes: Sequence[Sequence[int]]) -> Form:
        """In what form a model of `shapes` travels."""
        if self.rank == 0:
            return codec(self.codec)
        return LowRank(
            rank=self.rank or usual_width(shapes) // 8 or 1,
            values=codec(self.codec),
            min_compression_rate=2.0 if self.min_compression_rate is None else self.min_compression_rate,
            start=2 if self.start_compress is None else self.start_compress,
        )


def usual_width(shapes: Sequence[Sequence[int]]) -> int:
    """The smaller side that most entries' matrices have: d_model in a transformer; 1 without matrices."""
    sides: Counter[int] = Counter()
    for shape in shapes:
        if len(shape) > 1:
            rows, columns = shape[0], _product(shape[1:])
            sides[min(rows, columns)] += rows * columns
    return sides.most_common(1)[0][0] if sides else 1


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
