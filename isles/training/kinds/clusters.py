"""`pipeline.routing = "ravnest"`: nodes of clusters, each a replica, cut alike or each in its own way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from isles.comm.layout import Layout
from isles.training.kinds.peers import PeerWorld, absent
from isles.training.records.checkpoint import Checkpoints

if TYPE_CHECKING:
    from isles.comm.mesh import Mesh
    from isles.data import Corpus
    from isles.training.config.sections import Config
    from isles.training.plan.record import RunPlan


class ClusterWorld(PeerWorld):
    """See `WorldKind`."""

    situations = ("peers that come and go", "clusters that come and go")

    @override
    def check(self, config: Config) -> int:
        """Where there are several clusters, more workers may stand by."""
        clusters, workers = list(map(list, config.pipeline.ravnest.clusters)), config.world.workers
        nodes = sum(len(cuts) + 1 for cuts in clusters)
        if workers < nodes:
            raise ValueError(
                f"pipeline.ravnest.clusters = {clusters}: they are {nodes} workers, world.workers = {workers}; set it "
                f"to {nodes}, or to more, who stand by"
            )
        if workers > nodes and len(clusters) == 1:
            raise ValueError(
                f"world.workers = {workers}, pipeline.ravnest.clusters = {clusters}: who stands by begins with the "
                f"weights of another cluster, and there is one; set it to {nodes}"
            )
        return super().check(config)

    @override
    def replicas(self, config: Config) -> int:
        return len(config.pipeline.ravnest.clusters) or super().replicas(config)

    @override
    def layout(self, config: Config) -> Layout:
        lengths = [len(cuts) + 1 for cuts in config.pipeline.ravnest.clusters]
        return Layout.rows(lengths, aside=config.world.workers - sum(lengths)) if lengths else super().layout(config)

    @override
    def refuse(self, config: Config) -> None:
        from isles.training.clustered.cuts import cluster_cuts

        cluster_cuts(config)

    @override
    def plan(self, config: Config, *, probe: bool, machines: int) -> RunPlan:
        from isles.training.plan.clusters import plan_clusters

        return plan_clusters(config)

    @override
    def train(
        self, world: Mesh, config: Config, out: Path | None, resume: int | None, corpus: Corpus | None
    ) -> dict[str, Any] | None:
        """One that was lost when the checkpoint was written takes part again without a state: in its place, from the
        next average on, or standing by.
        """
        from isles.pipeline.ravnest.seats import ClusterSeats
        from isles.training.clustered.node import ClusterWorker

        if resume is None:
            node = ClusterWorker(config, world, corpus)
            node.meet(range(world.size))
            node.average.begin()
            return node.run(out)
        assert out is not None
        checkpoints = Checkpoints(out)
        saved, elsewhere = checkpoints.seats(resume), checkpoints.absent(resume)
        here = world.rank
        if here not in saved:
            here = next((worker for worker in saved if worker not in elsewhere), saved[0])
        state = checkpoints.read_shard(resume, here)
        seats = ClusterSeats.of_plain(state["seats"], world.size)
        gone = set(range(world.size)) - set(saved)
        node = ClusterWorker(config, world, corpus, seats.without(gone - seats.lost).returned())
        node.meet(range(world.size))
        (node.load_state_dict if world.rank in saved else node.come_back)(state)
        return node.run(out)

    @override
    def lost(self, run: Path, step: int, config: Config, *, newest: bool) -> tuple[int, list[str]] | None:
        if not config.pipeline.ravnest.clusters:
            return None
        told = "had been lost: they load the others' weights at the next average, or stand by"
        return step, [f"note: workers {absent(run, step, config)} {told}"]

    @override
    def churned(self) -> Callable[..., Any]:
        from isles.training.clustered.churned import ChurnedClusters

        return ChurnedClusters

    @override
    def keeper(self) -> type[Any]:
        from isles.training.clustered.keeping import ClusterKeeper

        return ClusterKeeper


KIND = ClusterWorld()
