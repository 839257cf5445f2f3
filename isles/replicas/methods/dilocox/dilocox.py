"""DiLoCoX's outer step (Qi et al., 2025, arXiv 2506.21263): a mean that takes a whole round to arrive, as low-rank
factors in 4 bits, with error feedback.

    round t, H inner steps from theta_i:
        delta_i = start_i - theta_i                    start_i: what the round began with
        Delta   = mean_j C(delta_j(t-1) + E_j)         arrives now; nothing in round 1
        v <- mu v + Delta;  W <- W - lr (Delta + mu v)
        C(delta_i + E_i) leaves;  E_i <- what C lost of it
        theta_i <- W - delta_i   (carry)               or  W   (restart)

W: anchor, equal on all workers; C: low rank by `isles.comm.collectives.factors`, its factors in `codec`, what is no
matrix in 8 bits; the first rounds dense. With carry every outer gradient enters once and the own progress is kept
while it travels; restart sets it aside, as `delayed` does, and wants a much lower rate. Rank and H follow what the
means make use of (`adaptive`), the same on all workers of a replica, its stages and its islands' workers alike, for 16
bytes to each other one a round. The readable text does not decide between carry and restart; carry fits its results.
Memory beyond training: W, v, E and start, 16 bytes a parameter, two payloads, and the factors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from typing_extensions import override

from isles.comm.codecs import codec
from isles.comm.codecs.kinds import CODECS
from isles.comm.codecs.lowrank import Form, LowRank
from isles.comm.collectives.factors import Factors
from isles.replicas.checks import at_least, momentum_in_range, one_of, positive_rate
from isles.replicas.loop.config import WeightedConfig
from isles.replicas.loop.outer import OuterSync
from isles.replicas.methods.diloco import Nesterov
from isles.replicas.methods.dilocox.adaptive import Adaptive, resized
from isles.replicas.parts.cadence import EveryH
from isles.replicas.parts.interfaces import Composition, Feedback, check_feedback, feedback
from isles.replicas.parts.landing import Carry, Replace
from isles.replicas.parts.mixing import Everyone


@dataclass(frozen=True, kw_only=True)
class DiLoCoXConfig(WeightedConfig):
    """Settings of `dilocox`."""

    sync_every: int = 125
    """Inner steps of a round (H_1)."""
    outer_lr: float = 0.4
    """Outer learning rate (lr); lower it before the momentum."""
    outer_momentum: float = 0.9
    """Outer momentum (mu)."""
    delay: Literal["carry", "restart", "none"] = "carry"
    """What a round starts from while the last one's mean is under way: carry (the anchor and the own progress), restart
    (the anchor), none (it is waited for).
    """
    rank: int | None = None
    """Rank of the factors at first (r_1); left out, an eighth of the width most matrices have; 0: no low rank."""
    codec: str = "int4"
    """Form of the factors, or of everything with rank = 0."""
    min_compression_rate: float | None = None
    """Matrices that would not shrink by more travel dense; left out, 2."""
    start_compress: int | None = None
    """So many rounds travel dense in 8 bits first; left out, 2."""
    error_feedback: Feedback = "local"
    """What the codec loses is added to the next round: "none", "local" or "global" (what differs from the mean)."""
    feedback_decay: float = 1.0
    """Factor on it each round, 0..1."""
    window: int | None = None
    """Rounds over which the rank, and with it H, is adapted; left out, 5; 0: both stay."""
    energy: float | None = None
    """Part of the mean's square that the ranks are to hold, 0..1; left out, 0.95."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
            rows, columns = shape[0], prod(shape[1:])
            sides[min(rows, columns)] += rows * columns
    return sides.most_common(1)[0][0] if sides else 1


class DiLoCoX(OuterSync):
    """All workers leave each boundary with equal anchors."""

    Config = DiLoCoXConfig
    config: DiLoCoXConfig
    cadence: EveryH

    @override
    def compose(self) -> Composition:
        config = self.config
        form = config.form([share.shape for share in self.shares])
        self.adaptive = None
        if isinstance(form, LowRank) and config.rank is None and not self.is_sketch:
            form = replace(form, rank=self.replica.largest(form.rank))  # parts may be of other widths
        if isinstance(form, LowRank) and config.rounds_averaged:
            self.adaptive = Adaptive(
                first_rank=form.rank,
                first_every=config.sync_every,
                window=config.rounds_averaged,
                energy=config.held,
                last=form.rank,
            )
            form = replace(form, adapts=True)
        return Composition(
            cadence=EveryH(config.sync_every, rounds_late=0 if config.delay == "none" else 1),
            mixing=Everyone(),
            rule=Nesterov(lr=config.outer_lr, momentum=config.outer_momentum),
            landing=Carry() if config.delay == "carry" else Replace(),
            codec=form,
            feedback=feedback(config.error_feedback, config.feedback_decay),
        )

    @override
    def adapt(self) -> None:
        (fragment,) = self.fragments
        form, adaptive = self.parts.codec, self.adaptive
        if adaptive is None or not isinstance(form, LowRank) or fragment.rounds <= form.start:
            return
        means = fragment.averaging  # no factors where this worker's share has no matrix that shrinks
        bases, matrices = (means.bases, means.matrices) if isinstance(means, Factors) else ([], [])
        sizes = [matrix.rows * matrix.columns for matrix in matrices]
        if adaptive.observe(bases, sizes, lambda own: self.replica.total(own, "inner")):
            round = fragment.rounds + 1
            adaptive.last = rank = adaptive.rank(round)
            bases[:] = [
                resized(basis, min(rank, matrix.rows), round) for basis, matrix in zip(bases, matrices, strict=True)
            ]
        self.cadence = replace(self.cadence, sync_every=adaptive.every(adaptive.last), origin=self.steps)

    @override
    def gauges(self) -> dict[str, float]:
        """Also the rank of the last round, and the inner steps of this one."""
        if self.adaptive is None:
            return super().gauges()
        return {**super().gauges(), "rank": self.adaptive.last, "sync_every": self.cadence.sync_every}

    @override
    def advise(self, steps: int) -> list[str]:
        notices = super().advise(steps)
        if self.adaptive is not None:
            notices.append("bytes and rounds are those of the first rank and H; both adapt (window = 0 keeps them)")
        return notices

    @override
    def outer_state(self) -> dict[str, Any]:
        seen: Sequence[float] = () if self.adaptive is None else self.adaptive.seen
        cadence = {"sync_every": self.cadence.sync_every, "origin": self.cadence.origin}
        last = 0 if self.adaptive is None else self.adaptive.last
        return {**super().outer_state(), "seen": list(seen), "rank": last, "cadence": cadence}

    @override
    def load_outer_state(self, state: dict[str, Any]) -> None:
        super().load_outer_state(state)
        self.cadence = replace(self.cadence, **state["cadence"])
        if self.adaptive is not None:
            self.adaptive.seen, self.adaptive.last = list(state["seen"]), state["rank"]
