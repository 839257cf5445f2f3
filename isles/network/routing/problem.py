"""The problem that a plan of paths solves: nodes in stages, seconds of their tasks and messages, and how many
microbatches they hold (SkipPipe, arXiv 2502.19913); and lower bounds on the time of any plan.

Stage 0 holds the origins: embedding, first layers, head and loss. Each origin has `memory` slots; a slot has one
microbatch on the way at a time and sends `waves` of them in a step, all along one path.

    path o -> v1 -> ... -> vn -> o, alone:
    w_o + sum_i (d(v_i-1, v_i) + w_vi) + d(vn, o) + loss w_o + d(o, vn) + sum_i (back w_vi + d(v_i, v_i-1)) + back w_o

`PathRules` are SkipPipe's convergence constraints. Stage 0 comes first and is never left out. A stage that comes after
a higher one is a swap, its distance how far it lies below the highest stage before it; a stage that lies further above
the highest one before it than one jumps over those between.

`lower_bounds`, which no plan beats:

round trip   slot k of an origin starts after k forwards there, and its waves go one after the other, each at least
             for the best round trip alone
origin       a node computes all forwards, losses and backwards of its own microbatches, and the first of them starts
             with nothing else to do until its best path is back
work         what all nodes of later stages have to do together, if it were spread evenly over their speeds
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from isles.base.errors import demand
from isles.network.routing.events import MOST_VISITS, Route, Task, TaskWire, orders_of
from isles.network.routing.replay import Delays, Replay, TaskSeconds, first_come, in_order, replay


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRules:
    """Which orders of stages are legal.

    Args:
        swaps: in one path, at most.
        distance: of a swap, in stages.
        total: of all swaps of a path together, in stages.
        jump: to how far above the highest stage so far the next one may lie.
    """

    swaps: int = 2
    distance: int = 1
    total: int = 2
    jump: int = 4

    def __post_init__(self) -> None:
        demand(self, "swaps distance total", lambda x: x >= 0, "choose 0 or more")
        demand(self, "jump", lambda x: x >= 1, "choose 1 or more; with 1 no stage is left out but the last ones")


def faults(order: Sequence[int], rules: PathRules) -> list[str]:
    """What is wrong with an order of stages, as phrases; empty for a legal one."""
    found = []
    if not order or order[0] != 0:
        found.append("does not begin with stage 0")
    if len(set(order)) < len(order):
        twice = sorted({stage for stage in order if order.count(stage) > 1})
        found.append(f"runs stage {twice[0]} twice")
    highest, distances = 0, []
    for stage in order[1:]:
        if stage < highest:
            distances.append(highest - stage)
        elif stage > highest + rules.jump:
            found.append(f"jumps from stage {highest} to {stage}, at most {highest + rules.jump} is allowed")
        highest = max(highest, stage)
    if any(distance > rules.distance for distance in distances):
        found.append(f"swaps stages {max(distances)} apart, at most {rules.distance} is allowed")
    if len(distances) > rules.swaps or sum(distances) > rules.total:
        found.append(
            f"has {len(distances)} swaps of distance {sum(distances)} in all, at most {rules.swaps} of {rules.total} "
            "are allowed"
        )
    return found


def legal_orders(stages: int, length: int, rules: PathRules) -> list[tuple[int, ...]]:
    """All legal orders of `length` of `stages` stages, in lexicographic order."""
    made: list[tuple[int, ...]] = []

    def extend(order: tuple[int, ...]) -> None:
        if len(order) == length:
            made.append(order)
            return
        for stage in range(1, stages):
            if stage not in order and not faults((*order, stage), rules):
                extend((*order, stage))

    extend((0,))
    return made


Slot = tuple[int, int]
"""An origin's node, and the number of the slot there."""
Path = tuple[int, ...]
"""Nodes in the order of execution, the origin first."""
Paths = Mapping[Slot, Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingCosts:
    """What a node's tasks cost.

    Args:
        loss: of loss and head, as a share of its forward.
        backward: the same of a backward.
        rest: seconds that it rests after a task.
        rest_at_origin: the same after the forward of a microbatch of its own.
    """

    loss: float = 0.25
    backward: float = 1.5
    rest: float = 0.0
    rest_at_origin: float = 0.0

    def __post_init__(self) -> None:
        demand(self, "loss backward rest rest_at_origin", lambda x: 0 <= x < math.inf, "choose 0 or more")


@dataclass(frozen=True, kw_only=True)
class RoutingProblem:
    """Nodes in stages, and microbatches that want paths through some of them.

    Args:
        stages: the nodes of each stage, numbered from 0 without gaps, each in one.
        delays: seconds of a microbatch from node to node, [source][target].
        forward: seconds of a forward, by node.
        path_length: stages that a microbatch runs, stage 0 included.
        memory: forwards that a node holds.
        waves: microbatches of a slot in a step.

    Raises:
        ValueError: in one line, for what cannot be planned.
    """

    stages: tuple[tuple[int, ...], ...]
    delays: tuple[tuple[float, ...], ...]
    forward: tuple[float, ...]
    path_length: int
    memory: int = 3
    waves: int = 2
    costs: RoutingCosts = field(default_factory=RoutingCosts)
    rules: PathRules = field(default_factory=PathRules)

    def __post_init__(self) -> None:
        nodes = sorted(node for stage in self.stages for node in stage)
        if not all(self.stages) or nodes != list(range(len(nodes))) or len(nodes) < 1:
            raise ValueError("stages must name the nodes 0, 1, 2 ... once each, and every stage at least one")
        count = len(nodes)
        if len(self.forward) != count or not all(0 < seconds < math.inf for seconds in self.forward):
            raise ValueError(f"forward must be {count} times above 0 s, one for each node")
        if len(self.delays) != count or any(len(row) != count for row in self.delays):
            raise ValueError(f"delays must be a matrix of {count} x {count} for {count} nodes")
        if not all(0 <= seconds < math.inf for row in self.delays for seconds in row):
            raise ValueError("delays must be 0 s or more and finite")
        demand(self, "memory waves", lambda x: x >= 1, "choose 1 or more")
        if len(self.stages) > MOST_VISITS:
            raise ValueError(f"{len(self.stages)} stages: at most {MOST_VISITS} can be planned")
        if not 1 <= self.path_length <= len(self.stages):
            raise ValueError(
                f"path_length = {self.path_length}: there are {len(self.stages)} stages, choose 1 to {len(self.stages)}"
            )

    @property
    def nodes(self) -> int:
        return len(self.forward)

    @property
    def origins(self) -> tuple[int, ...]:
        return self.stages[0]

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        stage_of = {node: number for number, stage in enumerate(self.stages) for node in stage}
        return tuple(stage_of[node] for node in range(self.nodes))

    @property
    def slots(self) -> list[Slot]:
        """All of them, an origin's one after the other."""
        return [(origin, number) for origin in self.origins for number in range(self.memory)]

    @property
    def microbatches(self) -> int:
        return len(self.slots) * self.waves

    @property
    def seconds(self) -> TaskSeconds:
        return TaskSeconds(
            forward=self.forward,
            loss=[self.costs.loss * seconds for seconds in self.forward],
            backward=[self.costs.backward * seconds for seconds in self.forward],
        )

    def rest(self, task: Task) -> float:
        return self.costs.rest_at_origin if task.kind == "F" and task.hop == 0 else self.costs.rest

    def hop(self, source: int, target: int) -> float:
        """Seconds of a microbatch from one node to another; none to itself."""
        return 0.0 if source == target else self.delays[source][target]

    def round_trip(self, path: Path) -> float:
        """Seconds of one microbatch along `path` if no other microbatch is in flight."""
        there = zip(path, (*path[1:], path[0]), strict=True)
        travel = sum(self.hop(one, other) + self.hop(other, one) for one, other in there)
        work = sum(self.forward[node] for node in path) * (1 + self.costs.backward)
        return work + travel + self.costs.loss * self.forward[path[0]]


def routes_of(paths: Paths, waves: int) -> list[Route]:
    """The routes of a step: in wave k slot i has microbatch k * slots + i, which starts after that of wave k - 1."""
    slots = list(paths)
    return [
        Route(wave * len(slots) + index, paths[slot], True, (wave - 1) * len(slots) + index if wave else None)
        for wave in range(waves)
        for index, slot in enumerate(slots)
    ]


def replay_paths(problem: RoutingProblem, paths: Paths) -> Replay:
    """A step of `paths`, tasks first come, first served."""
    return replay_routes(problem, routes_of(paths, problem.waves))


def replay_shared(problem: RoutingProblem, routes: Sequence[Route], wires: Sequence[TaskWire]) -> list[Replay]:
    """A step of `routes` over each of the `wires`, whose links messages share. Every node does its tasks in the order
    that they would have on unshared links, as a run with `pipeline.order = "plan"` does.
    """
    tasks = orders_of(replay_routes(problem, routes).spans)
    return [replay(routes, problem.seconds, wire, in_order(tasks), pause=problem.rest) for wire in wires]


def replay_routes(problem: RoutingProblem, routes: Sequence[Route]) -> Replay:
    """A step of `routes`; see `replay_paths`."""
    room = dict.fromkeys(range(problem.nodes), problem.memory)
    return replay(routes, problem.seconds, Delays(problem.delays), first_come, room=room, pause=problem.rest)


def lower_bounds(problem: RoutingProblem) -> dict[str, float]:
    """Seconds of a step by bound; the largest counts. ValueError if an origin has no legal path."""
    best, costs = BestPaths(problem), problem.costs
    trips, works = [], []
    for origin in problem.origins:
        found = best.of(origin)
        if found is None:
            raise ValueError(f"there is no legal path of {problem.path_length} stages: choose another path_length")
        first = problem.forward[origin] + costs.rest_at_origin
        trips.append((problem.memory - 1) * first + problem.waves * found[0])
        own = problem.memory * problem.waves
        each = problem.forward[origin] * (1 + costs.loss + costs.backward)
        works.append(own * (each + costs.rest_at_origin + 2 * costs.rest) - costs.rest)
    rate = sum(1 / problem.forward[node] for stage in problem.stages[1:] for node in stage)
    visits = problem.microbatches * (problem.path_length - 1)
    work = visits * (1 + costs.backward) / rate if visits else 0.0
    return {"round trip": max(trips), "origin": max(works), "work": work}


class BestPaths:
    """The best paths of a problem for a single microbatch: exact, over all legal orders.

    Round trips add up over the visits of a path, so the best way to each node of the last stage of an order is known
    once it is known for the order without it (Viterbi); orders that begin alike share what they have in common.
    """

    def __init__(self, problem: RoutingProblem) -> None:
        self._problem = problem
        self._orders = legal_orders(len(problem.stages), problem.path_length, problem.rules)

    def of(self, origin: int, full: Collection[int] = ()) -> tuple[float, Path] | None:
        """(seconds of the round trip, path) of the fastest path from `origin` that visits no node of `full`; the first
        in lexicographic order of those. None: there is none.
        """
        problem = self._problem
        back = 1 + problem.costs.backward
        start = (back + problem.costs.loss) * problem.forward[origin]
        open_nodes = [[node for node in sorted(stage) if node not in full] for stage in problem.stages]
        known: dict[tuple[int, ...], dict[int, tuple[float, Path]]] = {(0,): {origin: (start, (origin,))}}

        def reached(order: tuple[int, ...]) -> dict[int, tuple[float, Path]]:
            """The best way to each node of the last stage of `order`."""
            if order not in known:
                before = reached(order[:-1])
                known[order] = {
                    node: min(
                        (seconds + self._both_ways(last, node) + back * problem.forward[node], (*path, node))
                        for last, (seconds, path) in before.items()
                    )
                    for node in open_nodes[order[-1]]
                    if before
                }
            return known[order]

        found: tuple[float, Path] | None = None
        for order in self._orders:
            for last, (seconds, path) in reached(order).items():
                whole = seconds + self._both_ways(last, origin), path
                if found is None or whole < found:
                    found = whole
        return found if found is not None and math.isfinite(found[0]) else None

    def _both_ways(self, one: int, other: int) -> float:
        return self._problem.hop(one, other) + self._problem.hop(other, one)
