"""Methods every step of which exchanges the same: a run of any length is planned by its first two steps."""

from __future__ import annotations

from typing_extensions import override

from isles.network.planner.planned import Rhythm
from isles.replicas.schedule import Outline, outline
from isles.replicas.sync import ReplicaSync


class StepsAlike(ReplicaSync):
    """`schedule` says what each step exchanges."""

    @override
    def rhythm(self, steps: int) -> Rhythm:
        return Rhythm(0, 1)

    @override
    def own_outline(self, steps: int) -> Outline:
        return outline(self.schedule(min(steps, 2)), steps, self.opening(), per_step=True)
