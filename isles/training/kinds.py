"""The kinds of worlds of a run, chosen by its configuration, and their differences. Loads no torch by itself: the
functions and classes that a kind names are imported on first use.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from isles.base.imports import import_target
from isles.comm.layout import Layout, grid_of
from isles.training.records.checkpoint import Checkpoints, newest_whole, rank_to_load

if TYPE_CHECKING:
    from isles.pipeline.config import PipelineConfig
    from isles.training.config.sections import Config

_KINDS = {"swarm": "isles.training.kinds:SwarmWorld", "ravnest": "isles.training.kinds:ClusterWorld"}
"""The kinds with workers of their own, by `pipeline.routing`; for others it is `WorldKind`."""


class Lazy:
    """An attribute that imports the object at `target`, package.module:name, on each access."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __get__(self, kind: object, owner: type | None = None) -> Any:
        return import_target("pipeline.routing", self.target)


class WorldKind:
    """Replicas: a worker is a replica, an island's or a stage's part of one, or in a column of a plan of paths. Other
    kinds override what differs.

    refuse: refuses the configurations that `plan` does, at less cost. train: as `train_worker`, with the layout set.
    For runs that workers join and leave, simulated_run is the run on the virtual clock, lighthouse_server the
    lighthouse, and participant one peer as a member.
    """

    has_peers = False
    """Whether workers are peers that agree among themselves, and go on when others fail."""
    situations = ("peers that come and go",)
    """Those of `isles.training.config.conflicts.EXTERNAL_SITUATIONS` that apply if peers join and leave."""
    check_plan, plan_of = (Lazy(f"isles.training.config.conflicts:{name}") for name in ("check", "plan_of"))
    refuse = Lazy("isles.plan.sketch:refuse_known")
    plan = Lazy("isles.plan.replicas:plan_replicas")
    train = Lazy("isles.training.worker:train_replica")
    trainer = Lazy("isles.training.worker:trainer_of")
    simulated_run = Lazy("isles.training.simulated_churn:SimulatedElasticRun")
    lighthouse_server = Lazy("isles.training.lighthouse.rounds:RoundsLighthouseServer")
    participant: Any  # kinds with peers only

    def check(self, config: Config) -> int:
        """Number of workers that read text. ValueError, one line that names the key, if `config` is impossible."""
        return self.check_plan(config) if config.pipeline.skippipe.plan else self.replicas(config)

    def replicas(self, config: Config) -> int:
        """Number of replicas of the workers."""
        return config.world.workers // (config.pipeline.stages * config.world.inner)

    def layout(self, config: Config) -> Layout:
        if config.pipeline.skippipe.plan:
            return Layout.columns(self.plan_of(config.pipeline).problem.stages)
        return grid_of(config.world.workers, stage=config.pipeline.stages, inner=config.world.inner)

    def rank_to_load(self, checkpoints: Checkpoints, step: int, rank: int) -> int:
        """The worker whose state of `step` worker `rank` loads."""
        return rank

    def lost(self, run: Path, step: int, config: Config, *, newest: bool) -> tuple[int, list[str]] | None:
        """If some workers have not saved after `step`: the step from which all resume, and notices for the user; None
        if they cannot resume without resharding. newest: the user named no step. ValueError if there is no such step.
        """
        return None


class SwarmWorld(WorldKind):
    """Peers of stages, which are one replica together."""

    has_peers = True
    refuse = Lazy("isles.training.stage_runner:planned_cut")
    plan = Lazy("isles.plan.peers:plan_swarm")
    trainer = Lazy("isles.training.swarm.trainer:SwarmTrainer")
    simulated_run = Lazy("isles.training.simulated_churn:SimulatedSwarm")
    lighthouse_server = Lazy("isles.training.lighthouse.peers:SwarmLighthouseServer")
    participant = Lazy("isles.training.swarm.connect:SwarmParticipant")
    rank_to_load = staticmethod(rank_to_load)

    def check(self, config: Config) -> int:
        config.pipeline.peers_of(config.world.workers)
        return 1

    def replicas(self, config: Config) -> int:
        return 1

    def layout(self, config: Config) -> Layout:
        return Layout.columns(config.pipeline.peers_of(config.world.workers))

    def lost(self, run: Path, step: int, config: Config, *, newest: bool) -> tuple[int, list[str]] | None:
        whole = newest_whole(Checkpoints(run)) if newest else step
        if whole is None:
            raise ValueError(f"{run}: no checkpoint has the weights of every stage; start again")
        absent = _absent(run, whole, config)
        return whole, [f"workers {absent} start from the states of their stages' peers"] if absent else []


class ClusterWorld(WorldKind):
    """Nodes of clusters. Each cluster is a replica, with equal cuts or its own."""

    has_peers = True
    situations = ("peers that come and go", "clusters that come and go")
    refuse = Lazy("isles.training.clusters.stage_server:cluster_cuts")
    plan = Lazy("isles.plan.peers:plan_clusters")
    train = Lazy("isles.training.clusters.node:train_clustered")
    simulated_run = Lazy("isles.training.simulated_churn:SimulatedClusters")
    lighthouse_server = Lazy("isles.training.lighthouse.peers:ClusterLighthouseServer")
    participant = Lazy("isles.training.clusters.member:ClusterParticipant")

    def check(self, config: Config) -> int:
        """As `WorldKind.check`. With several clusters, further workers are standby."""
        clusters, workers = list(map(list, config.pipeline.ravnest.clusters)), config.world.workers
        nodes = sum(len(cuts) + 1 for cuts in clusters)
        if workers < nodes:
            raise ValueError(
                f"pipeline.ravnest.clusters = {clusters}: they are {nodes} workers, world.workers = {workers}; set it "
                f"to {nodes}, or to more, which are standby"
            )
        if workers > nodes and len(clusters) == 1:
            raise ValueError(
                f"world.workers = {workers}, pipeline.ravnest.clusters = {clusters}: a standby worker loads the "
                f"weights of another cluster, but there is only one; set it to {nodes}"
            )
        return self.replicas(config)

    def replicas(self, config: Config) -> int:
        return len(config.pipeline.ravnest.clusters) or super().replicas(config)

    def layout(self, config: Config) -> Layout:
        lengths = [len(cuts) + 1 for cuts in config.pipeline.ravnest.clusters]
        return Layout.rows(lengths, aside=config.world.workers - sum(lengths)) if lengths else super().layout(config)

    def lost(self, run: Path, step: int, config: Config, *, newest: bool) -> tuple[int, list[str]] | None:
        if not config.pipeline.ravnest.clusters:
            return None
        text = "had been lost: they load the others' weights at the next average, or are standby"
        return step, [f"note: workers {_absent(run, step, config)} {text}"]


def kind_of(pipeline: PipelineConfig) -> WorldKind:
    """The kind of a run."""
    return import_target("pipeline.routing", _KINDS.get(pipeline.routing, "isles.training.kinds:WorldKind"))()


def layout_of(config: Config) -> Layout:
    """The coordinates of all workers: a grid, the unequal columns of a plan or a swarm, or clusters of any length."""
    return kind_of(config.pipeline).layout(config)


def _absent(run: Path, step: int, config: Config) -> str:
    """The workers that have not saved after `step`, as text."""
    saved = Checkpoints(run).ranks(step)
    return ", ".join(str(worker) for worker in range(config.world.workers) if worker not in saved)
