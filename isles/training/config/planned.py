"""`pipeline.routing = "skippipe"`: whether the rest of a configuration can be run by its plan. Loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isles.network.named import links as named
from isles.network.routing.delays import fingerprint
from isles.network.routing.plan import PipelinePlan, read_plan
from isles.pipeline.config import PipelineConfig

if TYPE_CHECKING:
    from isles.training.config.sections import Config

_STEPS_WAITED = 5
"""Of a plan's steps, before somebody who is silent counts as lost: its last microbatch may come at the step's end."""


def plan_of(pipeline: PipelineConfig) -> PipelinePlan | None:
    """The plan of a run; None where its routing has none. ValueError as `read_plan`."""
    if not pipeline.skippipe.plan:
        return None
    try:
        return read_plan(pipeline.skippipe.plan)
    except ValueError as error:
        raise ValueError(f"pipeline.skippipe.plan = {error}") from None


def longest_wait(plan: PipelinePlan) -> float:
    """Seconds that nodes of a plan wait for each other at least."""
    return _STEPS_WAITED * plan.step_seconds


def check(config: Config) -> int:
    """Workers that read text: the plan's origins. ValueError, one line that names the key, where the plan is for
    something else than the run, or the run cannot keep to any.
    """
    pipeline, world = config.pipeline, config.world
    plan = plan_of(pipeline)
    assert plan is not None
    try:
        plan.refuse(workers=world.workers)
        if world.is_simulated:
            plan.refuse(links=fingerprint(named(world.virtual.links), world.workers))
        if pipeline.cut and len(pipeline.cut) == len(plan.problem.stages) - 1:
            plan.refuse(cuts=pipeline.cut)
    except ValueError as error:
        raise ValueError(f"pipeline.skippipe.plan = {pipeline.skippipe.plan}: {error}") from None
    problem, own = plan.problem, plan.problem.memory * plan.problem.waves
    if len(problem.stages) != pipeline.stages:
        raise ValueError(
            f"pipeline.stages = {pipeline.stages}: the plan has {len(problem.stages)}; set it to that, or plan again"
        )
    if pipeline.microbatches != own:
        raise ValueError(
            f"pipeline.microbatches = {pipeline.microbatches}: the plan sends {own} from each origin in a step (memory "
            f"{problem.memory} x waves {problem.waves}); set it to that"
        )
    return len(problem.origins)
