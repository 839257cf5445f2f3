"""Which stages each slot of a step runs: those of a plan, or drawn with one of SkipPipe's guidelines broken; and the
seconds of a step on the links of SkipPipe's second instance (arXiv 2502.19913), where those are at hand.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cache

from benchmarks._reference import instance
from isles.network.routing.events import StepPlay, Task
from isles.network.routing.problem import PathRules, RoutingProblem, Slot, faults, legal_orders, replay_paths, routes_of
from isles.network.routing.replay import Delays, first_come, seconds_of
from isles.network.routing.search import SearchEffort, full, with_collisions, without_collisions

Order = tuple[int, ...]

STAGES, LENGTH, SLOTS = 6, 4, 15
EVEN = (15, 9, 9, 9, 9, 9)
"""Visits by stage: as many as nodes hold in the instance."""
STEEP = (15, 15, 12, 9, 6, 3)
FREE_START = (10,) * 6
_TRIES = 4000


def planned(rules: PathRules | None = None) -> list[Order] | None:
    """Of the plan for the instance; None without it."""
    found = _plan(rules or PathRules())
    return None if found is None else list(found[0])


def drawn(kind: str, rng: random.Random) -> list[Order]:
    """`SLOTS` orders of a kind, with `EVEN` visits but for what the kind says.

    legal                  all guidelines are kept
    stage 0 left out       by a third of the slots; orders legal but for that
    swaps of 2, of 3       every slot has a swap that far apart
    uneven                 legal, visits as in `STEEP`
    """
    if kind == "stage 0 left out":
        return _fitted([order for order in _all_orders() if _legal_from_anywhere(order)], FREE_START, rng)
    if kind.startswith("swaps of "):
        apart = int(kind.removeprefix("swaps of "))
        wide = legal_orders(STAGES, LENGTH, _rules(apart))
        return _fitted([order for order in wide if _furthest_swap(order) == apart], EVEN, rng)
    return _fitted(legal_orders(STAGES, LENGTH, PathRules()), STEEP if kind == "uneven" else EVEN, rng)


def seconds(kind: str) -> float | None:
    """Of a step; None: there is no such plan, or the instance is not at hand.

    full                              fixed pipelines
    plan, swaps of 2, 3               the best plan found where swaps may be that far apart
    legal, uneven, stage 0 left out   drawn orders, each stage of each slot at the node that was found best
    """
    problem = _problem()
    if problem is None:
        return None
    if kind == "full":
        return full(problem).played.makespan
    if kind in ("legal", "uneven", "stage 0 left out"):
        return _placed(problem, drawn(kind, random.Random(0)))
    if kind != "plan" and not kind.startswith("swaps of "):
        return None
    found = _plan(PathRules() if kind == "plan" else _rules(int(kind[-1])))
    return None if found is None else found[1]


def _problem() -> RoutingProblem | None:
    found = instance("instance_head_defaults")
    return None if found is None else found[0]


def _rules(apart: int) -> PathRules:
    return PathRules(distance=apart, total=2 * apart)


@cache
def _plan(rules: PathRules) -> tuple[tuple[Order, ...], float] | None:
    """(orders of the slots, seconds of a step)."""
    given = _problem()
    if given is None:
        return None
    problem = replace(given, rules=rules)
    paths = with_collisions(problem, SearchEffort(), without_collisions(problem, SearchEffort()))
    orders = tuple(tuple(problem.stage_of[node] for node in path) for path in paths.values())
    return orders, replay_paths(problem, paths).makespan


def _placed(problem: RoutingProblem, orders: Sequence[Order]) -> float:
    """Seconds of a step of slots that run `orders`, each stage at the node that was found best, one after the other.

    Every path begins at its origin, which has the text; where the order leaves stage 0 out it only embeds there, which
    is taken to cost nothing.
    """
    paths: dict[Slot, tuple[int, ...]] = {}
    for index, (slot, order) in enumerate(zip(problem.slots, orders, strict=True)):
        later = [problem.stages[stage] for stage in order if stage]
        paths[slot] = (slot[0], *(nodes[index % len(nodes)] for nodes in later))
    light = {number for number, order in enumerate(orders) if 0 not in order}
    best, helped = _makespan(problem, paths, light), True
    while helped:
        helped = False
        for slot in problem.slots:
            for place, node in _others(problem, paths[slot]):
                tried = paths | {slot: (*paths[slot][:place], node, *paths[slot][place + 1 :])}
                found = _makespan(problem, tried, light)
                if found < best:
                    paths, best, helped = tried, found, True
    return best


def _others(problem: RoutingProblem, path: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(place, node) of all nodes that could stand at a place after the first, as `path` is at the beginning."""
    for place in range(1, len(path)):
        for node in problem.stages[problem.stage_of[path[place]]]:
            yield place, node


def _makespan(problem: RoutingProblem, paths: Mapping[Slot, tuple[int, ...]], light: Set[int]) -> float:
    """Seconds of a step; the first hop of the slots `light`, by their place among the paths, takes no time."""
    routes = routes_of(paths, problem.waves)
    by_number = {route.microbatch: route for route in routes}

    def duration(worker: int, task: Task) -> float:
        if task.hop == 0 and task.kind != "L" and task.microbatch % len(paths) in light:
            return 0.0
        return seconds_of(problem.seconds, by_number[task.microbatch], worker, task)

    room = dict.fromkeys(range(problem.nodes), problem.memory)
    spans = StepPlay(routes, first_come, Delays(problem.delays), duration, room, problem.rest).run()
    return max(span.end for span in spans)


def _fitted(orders: Sequence[Order], visits: Sequence[int], rng: random.Random) -> list[Order]:
    """Orders of `orders` with so many visits to each stage: exchanged one by one until it fits."""
    chosen = rng.choices(orders, k=SLOTS)
    for _ in range(_TRIES):
        now = _off(chosen, visits)
        if now == 0:
            rng.shuffle(chosen)
            return chosen
        other = list(chosen)
        other[rng.randrange(SLOTS)] = rng.choice(orders)
        if _off(other, visits) <= now:
            chosen = other
    raise ValueError("no such orders were found")


def _off(chosen: Sequence[Order], visits: Sequence[int]) -> int:
    """By how many visits they miss what is wanted."""
    found = Counter(itertools.chain(*chosen))
    return sum(abs(found[stage] - wanted) for stage, wanted in enumerate(visits))


def _all_orders() -> list[Order]:
    return list(itertools.permutations(range(STAGES), LENGTH))


def _legal_from_anywhere(order: Order) -> bool:
    """Legal but for where it begins: as if a stage before the first had run."""
    return not faults((0, *(stage + 1 for stage in order)), PathRules())


def _furthest_swap(order: Order) -> int:
    highest, furthest = 0, 0
    for stage in order:
        furthest = max(furthest, highest - stage)
        highest = max(highest, stage)
    return furthest
