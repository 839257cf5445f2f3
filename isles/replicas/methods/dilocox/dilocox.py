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
means make use of (`adaptive`; in an island each worker's rank follows its shares, and H is the largest that one of
them wants). The readable text does not decide between carry and restart; carry fits its results. Memory beyond
training: W, v, E and start, 16 bytes a parameter, two payloads, and the factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from isles.comm.codecs.lowrank import LowRank
from isles.comm.collectives.factors import Factors
from isles.replicas.dilocox_config import DiLoCoXConfig
from isles.replicas.loop.fragment import Fragment
from isles.replicas.loop.outer import OuterSync
from isles.replicas.methods.diloco import Nesterov
from isles.replicas.methods.dilocox.adaptive import Adaptive, resized
from isles.replicas.parts.cadence import EveryH
from isles.replicas.parts.feedback import feedback
from isles.replicas.parts.interfaces import Composition
from isles.replicas.parts.landing import Carry, Replace
from isles.replicas.parts.mixing import Everyone


class DiLoCoX(OuterSync):
    """See the module. All workers leave each boundary with equal anchors."""

    Config = DiLoCoXConfig
    config: DiLoCoXConfig
    cadence: EveryH

    def compose(self) -> Composition:
        """See OuterSync.compose."""
        config = self.config
        form = config.form([share.shape for share in self.shares])
        self.adaptive = None
        if isinstance(form, LowRank) and config.rounds_averaged and form.compresses(self.shares):
            self.adaptive = Adaptive(
                first_rank=form.rank,
                first_every=config.sync_every,
                window=config.rounds_averaged,
                energy=config.held,
                last=form.rank,
            )
        return Composition(
            cadence=EveryH(config.sync_every, rounds_late=0 if config.delay == "none" else 1),
            mixing=Everyone(),
            rule=Nesterov(lr=config.outer_lr, momentum=config.outer_momentum),
            landing=Carry() if config.delay == "carry" else Replace(),
            codec=form,
            feedback=feedback(config.error_feedback, config.feedback_decay),
        )

    def adapt(self) -> None:
        """See OuterSync.adapt."""
        (fragment,) = self.fragments
        form = self.parts.codec
        if isinstance(form, LowRank) and self.config.rounds_averaged and fragment.rounds > form.start:
            every = self.replica.largest(self._adapted(fragment))
            self.cadence = replace(self.cadence, sync_every=every, origin=self.steps)

    def _adapted(self, fragment: Fragment) -> int:
        """Give the next round its rank; the inner steps that it wants."""
        means, adaptive = fragment.averaging, self.adaptive
        if adaptive is None or not isinstance(means, Factors):
            return self.config.sync_every  # an island's worker whose shares are too small for factors
        if not all(basis.isfinite().all() for basis in means.bases):
            return self.cadence.sync_every  # without error feedback to notice it; the run's loss will tell
        adaptive.observe(means.bases, [matrix.rows * matrix.columns for matrix in means.matrices])
        round = fragment.rounds + 1
        adaptive.last = rank = adaptive.rank(round)
        means.bases = [
            resized(basis, min(rank, matrix.rows), round)
            for basis, matrix in zip(means.bases, means.matrices, strict=True)
        ]
        return adaptive.every(rank)

    def gauges(self) -> dict[str, float]:
        """See ReplicaSync.gauges: also the rank of the last round, and the inner steps of this one."""
        if self.adaptive is None:
            return super().gauges()
        return {**super().gauges(), "rank": self.adaptive.last, "sync_every": self.cadence.sync_every}

    def advise(self, steps: int) -> list[str]:
        """See ReplicaSync.advise."""
        notices = super().advise(steps)
        if self.adaptive is not None:
            notices.append("bytes and rounds are those of the first rank and H; both adapt (window = 0 keeps them)")
        return notices

    def outer_state(self) -> dict[str, Any]:
        """See ReplicaSync.outer_state."""
        seen: Sequence[float] = () if self.adaptive is None else self.adaptive.seen
        cadence = {"sync_every": self.cadence.sync_every, "origin": self.cadence.origin}
        last = 0 if self.adaptive is None else self.adaptive.last
        return {**super().outer_state(), "seen": list(seen), "rank": last, "cadence": cadence}

    def load_outer_state(self, state: dict[str, Any]) -> None:
        """See ReplicaSync.load_outer_state."""
        super().load_outer_state(state)
        self.cadence = replace(self.cadence, **state["cadence"])
        if self.adaptive is not None:
            self.adaptive.seen, self.adaptive.last = list(state["seen"]), state["rank"]
