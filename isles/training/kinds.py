"""The kinds of worlds that a run can be in, chosen from its configuration, and what differs between them. Loads no
torch by itself: what a kind names is imported where it is asked for.
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
"""By `pipeline.routing`, where the kind is that has workers of its own; all others are a `WorldKind`'s."""


class Lazy:
    """An attribute that is the object at `target`, package.module:name."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __get__(self, kind: object, owner: type | None = None) -> Any:
        return import_target("pipeline.routing", self.target)


class WorldKind:
    """Replicas: a worker each, an island's or a stage's part of one, or the columns of a plan of paths. Other kinds
    say what is otherwise.

    refuse: of a configuration, what `plan` refuses, at less cost. train: as `train_worker`, in a world that is
    arranged. Where workers come and go, churned is the run on the virtual clock, keeper the lighthouse, seated
    a peer in a seat that it gave.
    """

    has_peers = False
    """Whether workers are peers that agree among themselves, and go on when others fail."""
    situations = ("peers that come and go",)
    """Of `isles.training.config.conflicts.EXTERNAL_SITUATIONS`, those that hold where peers come and go."""
    check_plan, plan_of = (Lazy(f"isles.training.config.conflicts:{name}") for name in ("check", "plan_of"))
    refuse = Lazy("isles.plan.sketch:refuse_known")
    plan = Lazy("isles.plan.replicas:plan_replicas")
    train = Lazy("isles.training.worker:train_replica")
    trainer = Lazy("isles.training.worker:trainer_of")
    simulated_run = Lazy("isles.training.elastic.simulated:SimulatedElasticRun")
    lighthouse_server = Lazy("isles.training.lighthouse.rounds:RoundsLighthouseServer")
    participant: Any  # of peers

    def check(self, config: Config) -> int:
        """Workers that read text. ValueError, one line that names the key, where `config` cannot be."""
        return self.check_plan(config) if config.pipeline.skippipe.plan else self.replicas(config)

    def replicas(self, config: Config) -> int:
        """Copies of the model that the workers make up."""
        return config.world.workers // (config.pipeline.stages * config.world.inner)

    def layout(self, config: Config) -> Layout:
        if config.pipeline.skippipe.plan:
            return Layout.columns(self.plan_of(config.pipeline).problem.stages)
        return grid_of(config.world.workers, stage=config.pipeline.stages, inner=config.world.inner)

    def rank_to_load(self, checkpoints: Checkpoints, step: int, rank: int) -> int:
        """The worker whose state of `step` worker `rank` goes on from."""
        return rank

    def lost(self, run: Path, step: int, config: Config, *, newest: bool) -> tuple[int, list[str]] | None:
        """Where some workers have not saved after `step`: the step after which all go on, and what a user should know;
        None where they cannot as they are. newest: no step was asked for. ValueError where there is none.
        """
        return None


class SwarmWorld(WorldKind):
    """Peers of stages, which make up one replica."""

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
        return whole, [f"workers {absent} begin with what their stages' peers saved"] if absent else []


class ClusterWorld(WorldKind):
    """Nodes of clusters, a replica each, cut alike or each in its own way."""

    has_peers = True
    situations = ("peers that come and go", "clusters that come and go")
    refuse = Lazy("isles.training.clusters.cuts:cluster_cuts")
    plan = Lazy("isles.plan.peers:plan_clusters")
    train = Lazy("isles.training.clusters.node:train_clustered")
    simulated_run = Lazy("isles.training.simulated_churn:SimulatedClusters")
    lighthouse_server = Lazy("isles.training.lighthouse.peers:ClusterLighthouseServer")
    participant = Lazy("isles.training.clusters.member:ClusterParticipant")

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
        return self.replicas(config)

    def replicas(self, config: Config) -> int:
        return len(config.pipeline.ravnest.clusters) or super().replicas(config)

    def layout(self, config: Config) -> Layout:
        lengths = [len(cuts) + 1 for cuts in config.pipeline.ravnest.clusters]
        return Layout.rows(lengths, aside=config.world.workers - sum(lengths)) if lengths else super().layout(config)

    def lost(self, run: Path, step: int, config: Config, *, newest: bool) -> tuple[int, list[str]] | None:
        if not config.pipeline.ravnest.clusters:
            return None
        text = "had been lost: they load the others' weights at the next average, or stand by"
        return step, [f"note: workers {_absent(run, step, config)} {text}"]


def kind_of(pipeline: PipelineConfig) -> WorldKind:
    """The kind of a run."""
    return import_target("pipeline.routing", _KINDS.get(pipeline.routing, "isles.training.kinds:WorldKind"))()


def layout_of(config: Config) -> Layout:
    """The place of every worker: a grid, the unequal columns of a plan or a swarm, or clusters of unequal length."""
    return kind_of(config.pipeline).layout(config)


def _absent(run: Path, step: int, config: Config) -> str:
    """Who has not saved after `step`."""
    saved = Checkpoints(run).ranks(step)
    return ", ".join(str(worker) for worker in range(config.world.workers) if worker not in saved)
