"""What nodes turned out to be able to do: the forwards of a plan, corrected by the seconds that its run took."""

from __future__ import annotations

from collections.abc import Mapping

from isles.network.routing.plan import PipelinePlan
from isles.network.routing.problem import replay_paths


def planned_computing(plan: PipelinePlan) -> dict[int, float]:
    """Seconds of a step in which each node that is visited computes or rests."""
    problem = plan.problem
    seconds: dict[int, float] = {}
    for worker, task, start, end in replay_paths(problem, plan.paths).spans:
        seconds[worker] = seconds.get(worker, 0.0) + end - start + problem.rest(task)
    return seconds


def speed_factors(plan: PipelinePlan, measured: Mapping[int, float]) -> tuple[float, ...]:
    """How many times as long as planned each node takes. measured: seconds of computing in a step, by node; a node that
    is not visited, or not measured, is taken to be as planned.
    """
    planned = planned_computing(plan)
    return tuple(
        measured[node] / planned[node] if node in planned and node in measured else 1.0
        for node in range(plan.problem.nodes)
    )
