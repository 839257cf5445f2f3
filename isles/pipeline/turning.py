"""When the subspace of a run is turned (`isles.pipeline.boundaries.grassmann`): all stages of all replicas at the same
step, by a sum over all of their last stages.

    last stages     M summed over the workers inside the stage and over the replicas, in rank order -> U, the same bits
    their replicas  U from the last stage to the others

Every `every` steps; all replicas wait for each other then. What an outer method holds are coordinates: they turn along.
"""

from __future__ import annotations

from typing import Any

import torch

from isles.comm.mesh import Mesh
from isles.models.stages import Stage
from isles.pipeline.boundaries.grassmann import turned
from isles.pipeline.boundaries.scheme import Inside, Scheme


class BasisTurns:
    """Of one worker. every: steps; 0: never. rate: see `turned`."""

    def __init__(self, scheme: Scheme, stage: Stage, world: Mesh, *, every: int, rate: float) -> None:
        self.scheme = scheme if isinstance(scheme, Inside) and every else None
        self.stage, self.world, self.every, self.rate = stage, world, every, rate

    def before(self, step: int) -> None:
        """Called before inner step `step`, counted from 1, by all workers."""
        scheme, stages = self.scheme, self.world.stage
        if scheme is None or scheme.drift is None or step == 1 or (step - 1) % self.every:
            return
        basis = scheme.basis.clone()
        if stages.rank == stages.size - 1:
            total = scheme.drift.total
            for group in (self.world.inner, self.world.outer):
                total = torch.stack(group.all_gather(total, channel="pipeline")).sum(0)
            basis = turned(basis, total, self.rate)
            scheme.drift.total.zero_()
        stages.broadcast(basis, source=stages.size - 1, channel="pipeline")
        scheme.turn(self.stage, basis)

    def state_dict(self) -> dict[str, Any] | None:
        """None where nothing turns."""
        if self.scheme is None or self.scheme.drift is None:
            return None
        return {"basis": self.scheme.basis, "drift": self.scheme.drift.total}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from `state_dict`."""
        if state is not None and self.scheme is not None and self.scheme.drift is not None:
            self.scheme.turn(self.stage, state["basis"])
            self.scheme.drift.total.copy_(state["drift"])
