"""Who holds which part of a run's model."""

from __future__ import annotations

from isles.comm.layout import Layout, grid_of
from isles.training.config.planned import plan_of
from isles.training.config.sections import Config


def layout_of(config: Config) -> Layout:
    """The place of every worker: a grid, or the unequal columns of a plan."""
    plan = plan_of(config.pipeline)
    if plan is not None:
        return Layout.columns(plan.problem.stages)
    return grid_of(config.world.workers, stage=config.pipeline.stages, inner=config.world.inner)
