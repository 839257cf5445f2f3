"""DiLoCoX's outer step (Qi et al., 2025, arXiv 2506.21263): a mean that takes a whole round to arrive, as low-rank
factors in 4 bits, with error feedback.

    round t, H inner steps from theta_i:
        delta_i = start_i - theta_i                    start_i: what the round began with
        Delta   = mean_j C(delta_j(t-1) + E_j)         arrives now; nothing in round 1
        v <- mu v + Delta;  W <- W - lr (Delta + mu v)
        C(delta_i + E_i) leaves;  E_i <- what C lost of it
        theta_i <- W - delta_i   (carry)               or  W   (restart)

W: anchor, equal on all workers; C: low rank by `isles.comm.collectives.averaging`, its factors in `codec`, what is no
matrix in 8 bits; the first rounds dense. With carry every outer gradient enters once and the own progress stays
while it travels; restart sets it aside, as `delayed` does, and wants a much lower rate. Rank and H follow what the
means make use of (`Adaptive`), the same on all workers of a replica, its stages and its islands' workers alike, for 16
bytes to each other one a round. The readable text does not decide between carry and restart; carry fits its results.
Memory beyond training: W, v, E and start, 16 bytes a parameter, two payloads, and the factors.

`Adaptive` reads the rank and the inner steps of the next low-rank round off the last one (the paper's adaptive gradient
compression; the formulas are ours, the readable text gives none):

    used_j  smallest r with sum_{l<=r} s_l^2 >= energy sum_l s_l^2
    u_t     = mean_j used_j, weighted by the matrices' sizes: ranks that round t made use of
    r       = ceil(mean of the last `window` u_t), within max(1, r_1 / 8) .. r_1
    H       = round(H_1 r / r_1), within H_1 / 4 .. H_1: fewer bytes take less time to hide

s: singular values of matrix j's Q, which are those of its mean, for Po is orthonormal. Every tenth round takes r_1, or
the rank could never grow. Q is equal on all replicas, so all come to the same numbers without a message. Where several
workers hold parts of a replica, such as stages, j goes over the matrices of all of them, and they add up their parts:
all take the same rank and H.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from isles.base.modes import torch_threads
from isles.comm.codecs import codec
from isles.comm.codecs.lowrank import Form, LowRank
from isles.comm.collectives.averaging import Factors
from isles.replicas.loop.outer import OuterSync
from isles.replicas.methods.diloco import Nesterov
from isles.replicas.methods.dilocox.config import DiLoCoXConfig
from isles.replicas.parts.choices import Carry, EveryH, Everyone, Replace
from isles.replicas.parts.interfaces import Composition, feedback

PROBE = 10


@dataclass(kw_only=True)
class Adaptive:
    """first_rank: r_1. first_every: H_1. window, energy: see the module."""

    first_rank: int
    first_every: int
    window: int
    energy: float
    last: int
    """Rank of the last round."""
    seen: list[float] = field(default_factory=list)
    """u_t of the last rounds."""

    def observe(self, bases: Sequence[Tensor], sizes: Sequence[int], total: Callable[[Tensor], Tensor]) -> bool:
        """Take in the Q of the last round; sizes: entries of each matrix; total: the sum over the workers of the
        replica, who all call this. False, on all of them, where none has a matrix, or one a Q that is not finite.
        """
        finite = all(bool(basis.isfinite().all()) for basis in bases)
        used = (size * ranks_used(basis, self.energy) for basis, size in zip(bases, sizes, strict=True))
        own = torch.tensor([sum(used) if finite else math.nan, sum(sizes)], dtype=torch.float64, device="cpu")
        ranks, entries = total(own).tolist()
        if math.isnan(ranks) or not entries:
            return False
        self.seen = [*self.seen, ranks / entries][-self.window :]
        return True

    def rank(self, round: int) -> int:
        """Of round 1, 2, ..."""
        if not self.seen or round % PROBE == 0:
            return self.first_rank
        least = max(1, self.first_rank // 8)
        return min(max(math.ceil(sum(self.seen) / len(self.seen)), least), self.first_rank)

    def every(self, rank: int) -> int:
        """Inner steps of a round that is sent with `rank`."""
        wanted = round(self.first_every * rank / self.first_rank)
        return min(max(wanted, math.ceil(self.first_every / 4)), self.first_every)


def ranks_used(basis: Tensor, energy: float) -> int:
    """The smallest number of singular values of basis (n, r) that hold `energy` of their squares' sum; 0 of zeros."""
    with torch_threads(1):  # with more, which others may have, other bits
        squares = torch.linalg.svdvals(basis.double()).square().cumsum(0)
    if not squares[-1] > 0:
        return 0
    return int((squares < energy * squares[-1]).sum()) + 1


def resized(basis: Tensor, rank: int, seed: int) -> Tensor:
    """Q (n, r) with `rank` columns: its strongest directions, or random ones beside its own; equal on all workers."""
    rows, columns = basis.shape
    rank = min(rank, rows)
    if rank <= columns:
        return torch.linalg.svd(basis, full_matrices=False).U[:, :rank].contiguous() if rank < columns else basis
    draw = torch.Generator().manual_seed(seed)
    fresh = (
        torch.randn(rows, rank - columns, generator=draw, dtype=basis.dtype, device="cpu") * basis.norm() / rows**0.5
    )
    return torch.cat((basis, fresh), 1)


def factors_form(config: DiLoCoXConfig, shapes: Sequence[Sequence[int]]) -> Form:
    """In what form a model of `shapes` travels."""
    values = codec(config.codec, config.options_of("codec"))
    if config.rank == 0:
        return values
    return LowRank(
        rank=config.rank or usual_width(shapes) // 8 or 1,
        values=values,
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
