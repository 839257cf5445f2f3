"""Who holds which part of a run's model."""

from __future__ import annotations

from isles.comm.layout import Layout, grid_of
from isles.training.config.planned import plan_of
from isles.training.config.sections import Config
from isles.training.config.swarmed import stages_of


def layout_of(config: Config) -> Layout:
    """The place of every worker: a grid, the unequal columns of a plan or a swarm, or clusters of unequal length."""
    plan = plan_of(config.pipeline)
    if plan is not None:
        return Layout.columns(plan.problem.stages)
    if config.pipeline.ravnest.clusters:
        lengths = [len(cuts) + 1 for cuts in config.pipeline.ravnest.clusters]
        return Layout.rows(lengths, aside=config.world.workers - sum(lengths))
    if config.pipeline.routing == "swarm":
        return Layout.columns(stages_of(config.pipeline, config.world.workers))
    return grid_of(config.world.workers, stage=config.pipeline.stages, inner=config.world.inner)
