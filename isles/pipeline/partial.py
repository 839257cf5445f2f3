"""A plan of partial, reordered paths as routes and ways of the executor.

Node v of a plan is rank v of the run, wherever that stands in the pipeline's group. The order of tasks is that of the
plan's replay, so a step on the virtual clock takes what the plan says, where messages take what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from isles.network.routing.events import orders_of
from isles.network.routing.plan import PipelinePlan
from isles.network.routing.problem import replay_paths
from isles.network.routing.replay import TaskSeconds
from isles.network.routing.routes import Route, visited
from isles.pipeline.executor import Ways
from isles.pipeline.routers import PlanRouter

GradientScale = Literal["global", "visits"]


@dataclass(frozen=True, kw_only=True)
class PlannedRoutes:
    """How steps of `plan` run in a pipeline's group of `ranks`, in its order."""

    plan: PipelinePlan
    ranks: tuple[int, ...]

    @property
    def router(self) -> PlanRouter:
        """The plan's routes in positions."""
        return PlanRouter(tuple(self._placed(route) for route in self.plan.routes))

    def ways(self, order: Literal["plan", "arrival"], gradients: GradientScale, *, recompute: bool) -> Ways:
        """Ways for steps whose gradients are averaged over the nodes of a stage afterwards. A clock is charged with the
        plan's seconds, as multiples of its `step_seconds`.
        """
        problem = self.plan.problem
        seconds = problem.seconds
        nodes = range(len(self.ranks))
        tasks = None
        if order == "plan":
            listed = orders_of(replay_paths(problem, self.plan.paths).spans)
            tasks = {position: listed.get(rank, []) for position, rank in enumerate(self.ranks)}
        gains = gains_of(problem.stages, self.plan.routes, gradients)
        return Ways(
            room=dict.fromkeys(nodes, problem.memory),
            order="plan" if order == "plan" else "first come",
            recompute=recompute,
            shares=TaskSeconds(
                forward=[seconds.forward[rank] for rank in self.ranks],
                loss=[seconds.loss[rank] for rank in self.ranks],
                backward=[seconds.backward[rank] for rank in self.ranks],
            ),
            rest=problem.rest,
            tasks=tasks,
            gains={position: gains[problem.stage_of[rank]] for position, rank in enumerate(self.ranks)},
        )

    def _placed(self, route: Route) -> Route:
        return replace(route, visits=tuple(self.ranks.index(node) for node in route.visits))


def gains_of(stages: Sequence[Sequence[int]], routes: Sequence[Route], gradients: GradientScale) -> list[float]:
    """By stage: what the gradient that a node of it has of the mean loss over all microbatches is multiplied with, so
    that the mean over the stage's nodes is

        global    sum over the microbatches that visit the stage / all microbatches: the gradient of the mean loss
        visits    sum over the microbatches that visit the stage / their number

    A stage that nobody visits has no gradient either way.
    """
    visits = visited(routes)
    gains = []
    for nodes in stages:
        came_by = sum(visits[node] for node in nodes)
        share = came_by / len(routes) if gradients == "visits" and came_by else 1.0
        gains.append(len(nodes) / share)
    return gains
