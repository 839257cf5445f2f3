"""A run in a swarm whose peers come and go on the virtual clock, as a trace says. One that leaves does so after the
step under way.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from isles.comm.layout import Layout
from isles.comm.mesh import Mesh
from isles.data import Corpus
from isles.training.churned import ChurnedWorld
from isles.training.swarmed.trainer import SwarmTrainer


class ChurnedSwarm(ChurnedWorld[SwarmTrainer]):
    """One run; see `ChurnedWorld`."""

    @override
    def work(self, world: Mesh, corpus: Corpus) -> dict[str, Any] | None:
        stages = self.config.pipeline.peers_of(self.founders)
        stages[0] += range(self.founders, len(self.begins))  # until they are told where they are wanted
        placed = world.arranged(Layout.columns(stages))
        trainer = self.workers[world.rank] = SwarmTrainer(self.config, placed, corpus, range(self.founders))
        return trainer.run(self.out)

    @override
    def is_gone(self, worker: SwarmTrainer) -> bool:
        return worker.model_step.swarm.is_gone

    @override
    def leave(self, worker: SwarmTrainer) -> None:
        worker.model_step.swarm.leaving = True

    @override
    def counted(self) -> dict[str, Any]:
        if self.config.pipeline.swarm.stage_lost != "rebuild":
            return self.counts
        return self.counts | {"rebuilt": sum(trainer.model_step.rebuilt for trainer in self.workers.values())}
