"""A run in clusters whose nodes come and go on the virtual clock, as a trace says.

One that comes stands by from the next average on, takes the place of a lost or a leaving one, or makes a new cluster
with others who wait. One that leaves does so after the next average; where it holds what nobody else does, it stays
until somebody comes. One that stands still for `world.elastic.lease` is missed as if it were lost, as over a
lighthouse, and comes again once it goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from typing_extensions import override

from isles.comm.mesh import Mesh
from isles.data import Corpus
from isles.network.clusters.telling import SILENT
from isles.training.churned import ChurnedWorld
from isles.training.clustered.node import ClusterWorker
from isles.training.clustered.opening import enter, found
from isles.training.config.conflicts import refuse_conflicts
from isles.training.config.sections import Config
from isles.training.step import Left


class ChurnedClusters(ChurnedWorld[ClusterWorker]):
    """One run; see `ChurnedWorld`. ValueError for a configuration whose clusters cannot change in number."""

    gives_up = saves = True
    told: Mapping[int, int] = {}
    """What workers tell of themselves when they come, by rank (`isles.network.clusters.telling`)."""

    def __init__(self, config: Config, *more: Any) -> None:
        refuse_conflicts(config, "clusters that come and go")
        super().__init__(config, *more)

    @override
    def work(self, world: Mesh, corpus: Corpus) -> dict[str, Any] | None:
        rank = world.rank
        try:
            if rank < self.founders:
                self.workers[rank] = found(self.config, world, corpus, range(self.founders))
            else:
                self.workers[rank] = enter(self.config, world, corpus, range(rank), self.told.get(rank, SILENT))
            self.workers[rank].leaving = rank in self.asked
            return self.workers[rank].run(self.out)
        except Left:
            return None

    @override
    def is_gone(self, worker: ClusterWorker) -> bool:
        return worker.agreement.is_gone

    @override
    def leave(self, worker: ClusterWorker) -> None:
        worker.leaving = True

    @override
    def saving(self, rank: int) -> Collection[int]:
        return self.workers[rank].agreement.seats.living

    @override
    def counted(self) -> dict[str, Any]:
        """Clusters are those that were whole at the end."""
        ended = next(self.workers[rank] for rank in self.results)
        return self.counts | {"replicas": len(ended.agreement.seats.whole)}
