"""A run by a plan of paths, only planned: what its nodes hold and send in a step, and how long a step of it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from isles.comm.layout import Layout
from isles.network.named import links
from isles.network.planner.stages import StagedSteps
from isles.network.routing.events import orders_of
from isles.network.routing.plan import PipelinePlan
from isles.network.routing.problem import replay_paths
from isles.network.routing.replay import TaskSeconds, in_order, replay
from isles.network.routing.routes import Task
from isles.network.routing.wires import MessageLines, Sizes
from isles.network.topology import Topology
from isles.pipeline.config import PipelineConfig
from isles.pipeline.partial import PlannedRoutes
from isles.training.config.sections import WorldConfig

_AS_PLANNED = 1e-6


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """One node of a plan. visits: microbatches of a step whose forward it does. memory: bytes at the peak, without
    activations. forwards: that it keeps for their backward at the most; kept: bytes of what it got for them.
    bytes_a_step: that it sends to other stages in a step.
    """

    stage: int
    visits: int
    memory: int
    forwards: int
    kept: int
    bytes_a_step: int


def plan_steps(
    plan: PipelinePlan, config: PipelineConfig, layout: Layout, sizes: Sizes, *, asks_norm: bool
) -> StagedSteps:
    """The steps of a run, whose nodes together are one replica; a share of an inner step is a second."""
    ranks = tuple(layout.sharing(0, "inner"))
    steps = PlannedRoutes(plan=plan, ranks=ranks)
    ways = steps.ways("plan", config.gradients, recompute=config.recompute)
    assert ways.shares is not None
    return StagedSteps(
        routes=steps.router.routes,
        most_held=ways.room,
        shares=ways.shares,
        sizes=sizes,
        columns=[ranks],
        stages=len(ranks),
        asks_norm=asks_norm,
        listed=ways.tasks,
        rest=plan.problem.rest,
    )


def seconds_of_step(plan: PipelinePlan, sizes: Sizes, world: WorldConfig, seed: int) -> float:
    """From the start of a step to the end of its last task: the replay, in the plan's order, over the lines and with
    the speeds of a virtual run; on real lines what the plan says.
    """
    if not world.is_simulated:
        return plan.step_seconds
    problem, factors, routes = plan.problem, world.factors, plan.routes
    own = problem.seconds
    forward, loss, backward = (
        [seconds * factor for seconds, factor in zip(row, factors, strict=True)]
        for row in (own.forward, own.loss, own.backward)
    )
    by_number = {route.microbatch: route for route in routes}

    def rest(task: Task) -> float:
        return problem.rest(task) * factors[by_number[task.microbatch].worker(task)]

    return replay(
        routes,
        TaskSeconds(forward=forward, loss=loss, backward=backward),
        MessageLines(Topology(problem.nodes, links(world.links)), sizes, seed=seed),
        in_order(orders_of(replay_paths(problem, plan.paths).spans)),
        pause=rest,
    ).makespan


def plan_notices(plan: PipelinePlan, world: WorldConfig, seconds: float) -> list[str]:
    """What a user should know of a step of so many `seconds`."""
    if not world.is_simulated:
        return ["a step of the plan is said on the lines that it was made for, without what the real ones do"]
    said = plan.step_seconds
    if abs(seconds - said) <= _AS_PLANNED * said:
        return []
    return [
        f"a step takes {seconds:.6g} s, its plan says {said:.6g}: messages have other bytes, share lines, or nodes are "
        "slower than planned; plan again with the run's --tokens and --width, or --step-factors"
    ]


def node_plans(
    plan: PipelinePlan, staged: StagedSteps, memory: Sequence[int], forwards: Sequence[int], kept: Sequence[int]
) -> tuple[NodePlan, ...]:
    """Of all nodes. memory: bytes of each stage's nodes; forwards: that each node keeps; kept: bytes of one, by
    stage.
    """
    visits = Counter(node for route in plan.routes for node in route.visits)
    return tuple(
        NodePlan(
            stage=stage,
            visits=visits[node],
            memory=memory[stage],
            forwards=forwards[node],
            kept=forwards[node] * kept[stage],
            bytes_a_step=sent,
        )
        for node, (stage, sent) in enumerate(zip(plan.problem.stage_of, staged.sent(), strict=True))
    )
