"""Workers of a fixed number: a grid of replicas by stages by islands, or the columns of a plan of paths."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from isles.comm.layout import Layout
from isles.training.config.planned import check, plan_of
from isles.training.kinds import WorldKind
from isles.training.records.checkpoint import Checkpoints

if TYPE_CHECKING:
    from isles.comm.mesh import Mesh
    from isles.data import Corpus
    from isles.training.config.sections import Config
    from isles.training.plan.record import RunPlan
    from isles.training.trainer import Trainer


class FixedWorld(WorldKind):
    """See `WorldKind`."""

    @override
    def check(self, config: Config) -> int:
        return check(config) if config.pipeline.skippipe.plan else super().check(config)

    @override
    def layout(self, config: Config) -> Layout:
        plan = plan_of(config.pipeline)
        return super().layout(config) if plan is None else Layout.columns(plan.problem.stages)

    @override
    def refuse(self, config: Config) -> None:
        from isles.replicas import METHODS
        from isles.training.plan.sketch import sketch_run

        if config.model.factory is None and config.model.hf is None and config.method in METHODS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the run says it again
                sketch_run(config)

    @override
    def plan(self, config: Config, *, probe: bool, machines: int) -> RunPlan:
        from isles.training.plan.replicas import plan_replicas

        return plan_replicas(config, probe=probe, machines=machines)

    @override
    def trainer(self, config: Config, world: Mesh, corpus: Corpus | None) -> Trainer:
        from isles.training.trainer import Trainer

        return Trainer(config, world, corpus)

    @override
    def refuse_reshard(self, config: Config, run: Path, step: int) -> None:
        checkpoints = Checkpoints(run)
        if elsewhere := checkpoints.absent(step):
            raise ValueError(
                f"{run}: after step {step} the states of workers {', '.join(map(str, elsewhere))} lie on other "
                f"machines: copy them here, into {checkpoints.folder}, and resume without --nodes"
            )
        before = len(checkpoints.seats(step))
        if config.pipeline.skippipe.plan:
            raise ValueError(f"a plan is for its nodes: resume with {before} workers, as before")
        if config.world.inner > 1:
            raise ValueError(
                f"the workers of an island have parts of their own: resume with {before} workers, as before"
            )


KIND = FixedWorld()
