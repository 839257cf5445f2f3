"""The kinds of worlds that a run can be in: what differs between them, by kind, chosen from its configuration.

`fixed`    every worker is a replica, an island's or a stage's part of one; or microbatches go by a plan of paths
`elastic`  the same where workers come and go, in rounds
`swarm`    peers of stages    `clusters`   nodes of clusters    `peers`   what both of these share

Loads torch where a run is planned, trained or gone on with, and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isles.comm.layout import Layout, grid_of
from isles.training.records.checkpoint import Checkpoints

if TYPE_CHECKING:
    from isles.comm.mesh import Mesh
    from isles.data import Corpus
    from isles.pipeline.config import PipelineConfig
    from isles.training.config.sections import Config
    from isles.training.plan.record import RunPlan

_KINDS = {"swarm": "swarm", "ravnest": "clusters"}
"""By `pipeline.routing`, the module here whose `KIND` it is; of all others `fixed`, or `elastic`."""


class WorldKind:
    """What one kind does, with its usual answers."""

    has_peers = False
    """Whether workers are peers that agree among themselves, and so go on when others fail."""
    situations: tuple[str, ...] = ()
    """Of `isles.training.config.conflicts.TOLD`, those that hold where its workers come and go over a lighthouse."""

    def check(self, config: Config) -> int:
        """Workers that read text. ValueError, one line that names the key, where `config` cannot be."""
        return self.replicas(config)

    def replicas(self, config: Config) -> int:
        """Copies of the model that the workers make up."""
        return config.world.workers // (config.pipeline.stages * config.world.inner)

    def layout(self, config: Config) -> Layout:
        """The place of every worker."""
        return grid_of(config.world.workers, stage=config.pipeline.stages, inner=config.world.inner)

    def refuse(self, config: Config) -> None:
        """ValueError for what `plan` refuses, at less cost; called where workers come and go, too."""
        raise NotImplementedError

    def plan(self, config: Config, *, probe: bool, machines: int) -> RunPlan:
        """See `isles.training.plan.run_plan.plan_run`."""
        raise NotImplementedError

    def train(
        self, world: Mesh, config: Config, out: Path | None, resume: int | None, corpus: Corpus | None
    ) -> dict[str, Any] | None:
        """What a worker does whose world is arranged; see `isles.training.worker.train_worker`."""
        trainer = self.trainer(config, world, corpus)
        with trainer.memory:
            if resume is not None:
                assert out is not None
                checkpoints = Checkpoints(out)
                trainer.load_state_dict(checkpoints.read_shard(resume, self.seat(checkpoints, resume, world.rank)))
            return trainer.run(out)

    def trainer(self, config: Config, world: Mesh, corpus: Corpus | None) -> Any:
        """A `Trainer`, of one worker."""
        raise NotImplementedError

    def seat(self, checkpoints: Checkpoints, step: int, rank: int) -> int:
        """The worker whose state of `step` worker `rank` goes on from."""
        return rank

    def lost(self, run: Path, step: int, config: Config, *, newest: bool) -> tuple[int, list[str]] | None:
        """Where not all workers have saved after `step`: the step after which all go on as they are, and what a user
        should know; None where they cannot. newest: no step was asked for. ValueError where no step would do.
        """
        return None

    def refuse_reshard(self, config: Config, run: Path, step: int) -> None:
        """ValueError where the states after `step` cannot be made those of other workers or stages."""

    def churned(self) -> Callable[..., Any]:
        """What makes a run whose workers come and go on the virtual clock: (config, churn, out, on_line, on_notice)."""
        raise NotImplementedError

    def keeper(self) -> type[Any]:
        """The class of its lighthouse, a `RunKeeper`."""
        raise NotImplementedError


def kind_of(pipeline: PipelineConfig, *, elastic: bool = False) -> WorldKind:
    """The kind of a run. elastic: its workers come and go; peers and nodes know how to, others are told so."""
    usual = "elastic" if elastic else "fixed"
    return import_module(f"isles.training.kinds.{_KINDS.get(pipeline.routing, usual)}").KIND


def layout_of(config: Config) -> Layout:
    """The place of every worker: a grid, the unequal columns of a plan or a swarm, or clusters of unequal length."""
    return kind_of(config.pipeline).layout(config)
