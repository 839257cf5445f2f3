"""A plan of partial, reordered paths as routes and ways of the executor (SkipPipe, arXiv 2502.19913).

Node v of a plan is rank v of the run, at any position in the pipeline's group. The order of tasks is that of the plan's
replay, so a step on the virtual clock takes the planned time if messages do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from isles.network.routing.events import Route, orders_of, visited
from isles.network.routing.plan import PipelinePlan
from isles.network.routing.problem import replay_paths
from isles.network.routing.replay import TaskSeconds
from isles.pipeline.config import PipelineConfig
from isles.pipeline.executor import Ways
from isles.pipeline.routers import StepRoutes, always


def planned_routes(
    plan: PipelinePlan, ranks: Sequence[int], config: PipelineConfig, order: Literal["plan", "arrival"]
) -> tuple[StepRoutes, Ways]:
    """The routes of `plan` in positions of a pipeline's group of `ranks`, and the ways of its steps; gradients are
    averaged over the nodes of a stage afterwards. The clock is charged with the plan's seconds, as multiples of its
    `step_seconds`.
    """
    problem = plan.problem
    seconds, tasks = problem.seconds, None
    if order == "plan":
        listed = orders_of(replay_paths(problem, plan.paths).spans)
        tasks = {position: listed.get(rank, []) for position, rank in enumerate(ranks)}
    gains = gains_of(problem.stages, plan.routes, config.skippipe.gradients)
    ways = Ways(
        room=dict.fromkeys(range(len(ranks)), problem.memory),
        order="plan" if order == "plan" else "first come",
        recompute=config.recompute,
        shares=TaskSeconds(
            forward=[seconds.forward[rank] for rank in ranks],
            loss=[seconds.loss[rank] for rank in ranks],
            backward=[seconds.backward[rank] for rank in ranks],
        ),
        rest=problem.rest,
        tasks=tasks,
        gains={position: gains[problem.stage_of[rank]] for position, rank in enumerate(ranks)},
    )
    placed = (replace(route, visits=tuple(map(ranks.index, route.visits))) for route in plan.routes)
    return always(placed), ways


def gains_of(
    stages: Sequence[Sequence[int]], routes: Sequence[Route], gradients: Literal["global", "visits"]
) -> list[float]:
    """By stage: the factor of a node's gradient of the mean loss over all microbatches, so that the mean over the
    stage's nodes is

        global    sum over the microbatches that visit the stage / all microbatches: the gradient of the mean loss
        visits    sum over the microbatches that visit the stage / their number

    A stage that no microbatch visits has no gradient either way.
    """
    visits = visited(routes)
    gains = []
    for nodes in stages:
        came_by = sum(visits[node] for node in nodes)
        share = came_by / len(routes) if gradients == "visits" and came_by else 1.0
        gains.append(len(nodes) / share)
    return gains
