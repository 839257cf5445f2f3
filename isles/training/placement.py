"""Who holds which part of a run's model."""

from __future__ import annotations

from isles.comm.layout import Coordinate, Layout, grid_of
from isles.training.config.planned import plan_of
from isles.training.config.sections import Config
from isles.training.config.swarmed import stages_of


def layout_of(config: Config) -> Layout:
    """The place of every worker: a grid, the unequal columns of a plan or a swarm, or clusters of unequal length."""
    plan = plan_of(config.pipeline)
    if plan is not None:
        return Layout.columns(plan.problem.stages)
    if config.pipeline.clusters:
        lengths = [len(cuts) + 1 for cuts in config.pipeline.clusters]
        return Layout.rows(lengths, aside=config.world.workers - sum(lengths))
    if config.pipeline.routing == "swarm":
        return Layout.columns(stages_of(config.pipeline, config.world.workers))
    return grid_of(config.world.workers, stage=config.pipeline.stages, inner=config.world.inner)


def holders_of(layout: Layout) -> list[list[int]]:
    """By place in a replica, stage after stage, the ranks that hold the same of the model, in the order of their
    group.
    """
    first = layout.coordinates.index(Coordinate(0, 0, 0))
    return [layout.sharing(rank, "stage", "inner") for rank in layout.sharing(first, "replica")]
