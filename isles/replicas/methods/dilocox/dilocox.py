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
from dataclasses import replace
from math import prod
from typing import Any

from typing_extensions import override

from isles.comm.codecs import codec
from isles.comm.codecs.lowrank import Form, LowRank
from isles.comm.collectives.factors import Factors
from isles.replicas.loop.outer import OuterSync
from isles.replicas.methods.diloco import Nesterov
from isles.replicas.methods.dilocox.adaptive import Adaptive, resized
from isles.replicas.methods.dilocox.config import DiLoCoXConfig
from isles.replicas.parts.cadence import EveryH
from isles.replicas.parts.interfaces import Composition, feedback
from isles.replicas.parts.landing import Carry, Replace
from isles.replicas.parts.mixing import Everyone


def factors_form(config: DiLoCoXConfig, shapes: Sequence[Sequence[int]]) -> Form:
    """In what form a model of `shapes` travels."""
    if config.rank == 0:
        return codec(config.codec)
    return LowRank(
        rank=config.rank or usual_width(shapes) // 8 or 1,
        values=codec(config.codec),
        min_compression_rate=2.0 if config.min_compression_rate is None else config.min_compression_rate,
        start=2 if config.start_compress is None else config.start_compress,
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
        form = factors_form(config, [share.shape for share in self.shares])
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
