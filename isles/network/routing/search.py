"""Paths for the slots of a problem: legal, and as fast as a search finds them; `routing_strategies` compares four ways.

SkipPipe (arXiv 2502.19913) resolves three kinds of conflict between the best paths of single microbatches: more slots
in a stage than it holds, more on a node than it holds, and visits that collide. Here

    full      fixed pipelines through all stages, as many as the smallest stage has nodes (what a plan competes with)
    random    legal paths that know nothing of the network: stages by the room that is left, nodes at random
    without   simulated annealing over legal paths towards the least slowest round trip alone: no look at collisions
    with      annealing towards the least seconds of a whole step, in which collisions count for what they cost, on from
              the paths of `without`, so never slower: the plan

Each search is done coarse, with one path for all slots of an origin, and fine, with a path for each slot. A legal set
of paths stays legal in every move: one path takes its stages in another order, two paths exchange nodes, or a path
takes a node that has room. Everything follows from the seed, unless the time is over before the moves are.

`Stopwatch` times a legal plan without a replay of its events. Where no forward ever waits for memory, a node serves its
tasks in the order in which they become ready, so one heap of ready tasks is enough: a task that is taken from it starts
when it is ready and its node is free. No forward waits where no more slots come by a node than it holds, for a slot has
one microbatch on the way.

`assign`: which node takes which stage, by a genetic search, as DT-FM's (Yuan et al., arXiv 2206.01288) with SkipPipe's
score.

    score = D + 2 P
    D: the longest delay between two nodes of one stage, who average their gradients
    P: the shortest closed tour over the stages from stage 0, where going from one stage to another costs as much as the
       worst pair in the best pairing of their nodes (bottleneck matching), and a pair u, v costs d(u, v) + forward of u

Nodes left over in the larger of two stages stay without a partner. A child takes five nodes' stages from one parent and
the rest from the other, sizes are repaired, and then it is improved by exchanges of two nodes.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heapify, heappop, heapreplace
from itertools import pairwise
from operator import add
from statistics import fmean

from isles.network.routing.events import Route
from isles.network.routing.plan import PlanNetwork
from isles.network.routing.problem import Path, Paths, RoutingProblem, legal_orders, replay_routes, routes_of
from isles.network.routing.replay import Replay, Sizes, bytes_sent

Stages = tuple[tuple[int, ...], ...]
CostMatrix = Sequence[Sequence[float]]

MOST_STAGES = 10
"""The most stages of the exact tour, whose cost doubles with every stage."""
_POPULATION, _CHILDREN, _INHERITED = 6, 12, 5
_EXCHANGES = 200
"""The most exchanges to try in a round of improvement."""


class Scores:
    """The score of an assignment. delays and forward: as in `RoutingProblem`; pairings are cached."""

    def __init__(self, delays: CostMatrix, forward: Sequence[float]) -> None:
        self._delays, self._forward = delays, forward
        self._pairing = cache(self._worst_pair)

    def __call__(self, stages: Stages) -> float:
        """The score of stages. The first has the origins; the order of the others does not count."""
        inside = (self._delays[u][v] for stage in stages for u in stage for v in stage if u != v)
        return max(inside, default=0.0) + 2 * self.tour(stages)[0]

    def tour(self, stages: Stages) -> tuple[float, tuple[int, ...]]:
        """(length, order) of the shortest closed tour from stage 0, by Held and Karp's recursion."""
        count = len(stages)
        if count > MOST_STAGES:
            raise ValueError(
                f"{count} stages: nodes are assigned to at most {MOST_STAGES}; give the nodes of each stage"
            )
        between = [[self._pairing(one, other) for other in stages] for one in stages]
        table = _tours(between)
        order, seen = [0], (1 << count) - 1
        last = min(range(count), key=lambda stage: table[seen][stage] + between[stage][0])
        length = table[seen][last] + between[last][0]
        while last:  # back along the way that the table was filled
            order.insert(1, last)
            seen ^= 1 << last
            last = min(range(count), key=lambda stage: table[seen][stage] + between[stage][order[1]])
        return length, tuple(order)

    def _worst_pair(self, one: tuple[int, ...], other: tuple[int, ...]) -> float:
        if one == other:
            return 0.0
        return bottleneck([[self._delays[u][v] + self._forward[u] for v in other] for u in one])[0]


def _tours(between: CostMatrix) -> list[list[float]]:
    """[set of stages as bits][last of them]: length of the shortest way from stage 0 through all of the set."""
    count = len(between)
    table = [[math.inf] * count for _ in range(1 << count)]
    table[1][0] = 0.0
    towards = list(zip(*between, strict=True))
    for seen in range(1, 1 << count, 2):
        row = table[seen]
        for stage in range(1, count):
            if not seen >> stage & 1:
                table[seen | 1 << stage][stage] = min(map(add, row, towards[stage]))
    return table


def bottleneck(costs: CostMatrix) -> tuple[float, list[tuple[int, int]]]:
    """(largest cost, pairs) of the pairing of rows and columns, as many as the fewer of them, whose largest cost is the
    least: bisection over the costs, augmenting paths.
    """
    if len(costs) > len(costs[0]):
        worst, pairs = bottleneck(list(zip(*costs, strict=True)))
        return worst, sorted((row, column) for column, row in pairs)
    levels = sorted({cost for row in costs for cost in row})
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        if len(_matched(costs, levels[middle])) == len(costs):
            high = middle
        else:
            low = middle + 1
    return levels[low], sorted((row, column) for column, row in _matched(costs, levels[low]).items())


def _matched(costs: CostMatrix, most: float) -> dict[int, int]:
    """A largest matching among pairs that cost `most` or less: row by column."""
    partner: dict[int, int] = {}

    def augment(row: int, tried: set[int]) -> bool:
        for column, cost in enumerate(costs[row]):
            if cost <= most and column not in tried:
                tried.add(column)
                if column not in partner or augment(partner[column], tried):
                    partner[column] = row
                    return True
        return False

    for row in range(len(costs)):
        augment(row, set())
    return partner


def assign(
    sizes: Sequence[int], delays: CostMatrix, forward: Sequence[float], *, seed: int = 0, seconds: float | None = None
) -> Stages:
    """Stages of `sizes` nodes with a low score, in the order of their tour. seconds: time limit; the best so far
    counts. ValueError if the sizes do not fit.
    """
    if not sizes or min(sizes) < 1 or sum(sizes) != len(forward):
        raise ValueError(
            f"stages of {', '.join(map(str, sizes))} nodes are {sum(sizes)}: there are {len(forward)} nodes"
        )
    rng, score = random.Random(seed), Scores(delays, forward)
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    crowd = [_improved(score, _drawn(sizes, rng), rng, deadline)]
    while len(crowd) < _POPULATION and time.monotonic() < deadline:
        crowd.append(_improved(score, _drawn(sizes, rng), rng, deadline))
    for _ in range(_CHILDREN):
        if len(crowd) < 2 or time.monotonic() > deadline:
            break
        one, other = rng.sample(crowd, 2)
        child = _improved(score, _child(sizes, one[1], other[1], rng), rng, deadline)
        worse = max(one, other)
        if child < worse and child not in crowd:
            crowd[crowd.index(worse)] = child
    best = min(crowd)[1]
    order = score.tour(best)[1]
    # Stages of equal size may change places in the tour; those of other sizes keep theirs.
    ordered = [best[stage] for stage in order]
    return tuple(ordered) if [len(stage) for stage in ordered] == list(sizes) else best


def aligned(stages: Stages, delays: CostMatrix, forward: Sequence[float]) -> list[tuple[int, ...]]:
    """Fixed pipelines through all stages, as many as the smallest has nodes: each stage's nodes beside those before
    them, by the pairing with the least largest cost.
    """
    count = min(map(len, stages))
    pipelines: list[tuple[int, ...]] = [(node,) for node in stages[0]]
    for stage in stages[1:]:
        costs = [[delays[pipeline[-1]][node] + forward[pipeline[-1]] for node in stage] for pipeline in pipelines]
        pipelines = [(*pipelines[row], stage[column]) for row, column in bottleneck(costs)[1]]
    return pipelines[:count]


def _drawn(sizes: Sequence[int], rng: random.Random) -> Stages:
    nodes = list(range(sum(sizes)))
    rng.shuffle(nodes)
    cuts = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    return tuple(tuple(sorted(nodes[low:high])) for low, high in pairwise(cuts))


def _child(sizes: Sequence[int], one: Stages, other: Stages, rng: random.Random) -> Stages:
    """The stages of `other`, except for some nodes that are placed as in `one`."""
    stage_by_node = {node: number for number, stage in enumerate(other) for node in stage}
    theirs = {node: number for number, stage in enumerate(one) for node in stage}
    inherited = set(rng.sample(sorted(stage_by_node), min(_INHERITED, len(stage_by_node))))
    stage_by_node |= {node: theirs[node] for node in inherited}
    members = [[node for node, stage in stage_by_node.items() if stage == number] for number in range(len(sizes))]
    spare = []
    for number, size in enumerate(sizes):
        members[number].sort(key=lambda node: (node not in inherited, rng.random()))
        spare += members[number][size:]
        members[number] = members[number][:size]
    for number, size in enumerate(sizes):
        while len(members[number]) < size:
            members[number].append(spare.pop())
    return tuple(tuple(sorted(stage)) for stage in members)


def _improved(score: Scores, stages: Stages, rng: random.Random, deadline: float) -> tuple[float, Stages]:
    """Exchange two nodes whenever that lowers the score, until a round brings no improvement."""
    value, helped = score(stages), True
    pairs = [
        (one, u, other, v)
        for one in range(len(stages))
        for other in range(one)
        for u in range(len(stages[one]))
        for v in range(len(stages[other]))
    ]
    while helped and time.monotonic() < deadline:
        helped = False
        for one, u, other, v in rng.sample(pairs, min(len(pairs), _EXCHANGES)):
            changed = list(stages)
            changed[one] = _replaced(stages[one], u, stages[other][v])
            changed[other] = _replaced(stages[other], v, stages[one][u])
            after = tuple(changed)
            found = score(after)
            if found < value:
                stages, value, helped = after, found, True
    return value, stages


def _replaced(stage: tuple[int, ...], index: int, node: int) -> tuple[int, ...]:
    return tuple(sorted((*stage[:index], node, *stage[index + 1 :])))


class Stopwatch:
    """The makespan of one set of paths after another, in a fraction of a replay's time.

    Equal to `replay_paths` to the bit for legal plans.
    """

    def __init__(self, problem: RoutingProblem) -> None:
        self._problem = problem
        self._seconds = problem.seconds
        self._chain = cache(self._tasks)

    def __call__(self, paths: Sequence[Path]) -> tuple[float, float]:
        """(seconds of a step, mean seconds until a slot is done) with one path for each slot."""
        chains = [self._chain(path) for path in paths]
        slots = len(chains)
        last = slots * (self._problem.waves - 1)
        free = [0.0] * self._problem.nodes
        heap = [(0.0, microbatch, 0) for microbatch in range(slots)]
        heapify(heap)
        total = longest = 0.0
        while heap:
            ready, microbatch, step = heap[0]
            chain = chains[microbatch % slots]
            node, seconds, rest, way = chain[step]
            end = (ready if ready > free[node] else free[node]) + seconds
            free[node] = end + rest
            if step + 1 < len(chain):
                heapreplace(heap, (end + way, microbatch, step + 1))
            elif microbatch < last:
                heapreplace(heap, (end, microbatch + slots, 0))
            else:
                heappop(heap)
                total += end
                longest = max(longest, end)
        return longest, total / slots

    def _tasks(self, path: Path) -> list[tuple[int, float, float, float]]:
        """(node, seconds, rest, way to the next) of each task."""
        problem, route = self._problem, Route(0, path, True)
        seconds = {"F": self._seconds.forward, "L": self._seconds.loss, "B": self._seconds.backward}
        made = []
        for task in route.tasks():
            node, following = route.worker(task), route.following(task)
            way = 0.0 if following is None else problem.hop(node, route.worker(following))
            made.append((node, seconds[task.kind][node], problem.rest(task), way))
        return made


Score = Callable[[Sequence[Path]], float]

_TIE = 1e-3
"""Weight of the mean beside the slowest, so that a search sees progress where the slowest one does not move."""
_HOT, _COLD = 0.03, 0.0005
"""Temperature at the start and at the end, as shares of the first score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchEffort:
    """How long to search.

    Args:
        moves: tried in each of the three searches.
        seconds: time limit; the best so far counts; None: no limit, and the same plan on every machine.
    """

    moves: int = 20_000
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.moves < 1:
            raise ValueError(f"moves = {self.moves}: choose 1 or more")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"time_budget_s = {self.seconds}: choose more than 0 s")


def blind(problem: RoutingProblem, seed: int = 0) -> Paths:
    """Legal paths chosen without regard to the network. ValueError if there are none."""
    return dict(zip(problem.slots, _Moves(problem, random.Random(seed)).start(), strict=True))


def without_collisions(problem: RoutingProblem, effort: SearchEffort, seed: int = 0) -> Paths:
    """Legal paths whose slowest single round trip is the shortest found, with one path per origin or one per slot,
    whichever has the shorter step. ValueError if there are none.
    """
    rng = random.Random(seed)
    # A slot starts after the forwards of those before it at its origin.
    starts = [number * problem.forward[origin] for origin, number in problem.slots]
    trip = cache(problem.round_trip)

    def score(paths: Sequence[Path]) -> float:
        ends = [start + trip(path) for start, path in zip(starts, paths, strict=True)]
        return max(ends) + _TIE * sum(ends) / len(ends)

    deadline = _deadline(effort, 0.2)
    moves = _Moves(problem, rng)
    fine = _anneal(moves, moves.start(), score, effort.moves, deadline, rng)
    coarse = _coarse(problem, score, effort.moves, _deadline(effort, 0.1), rng)
    found = fine if coarse is None else min(fine, coarse, key=Stopwatch(problem))
    return dict(zip(problem.slots, found, strict=True))


def with_collisions(problem: RoutingProblem, effort: SearchEffort, begin: Paths, seed: int = 0) -> Paths:
    """The legal paths with the shortest step found; never longer than that of `begin`."""
    rng = random.Random(seed + 1)
    stopwatch = Stopwatch(problem)

    def score(paths: Sequence[Path]) -> float:
        longest, mean = stopwatch(paths)
        return longest + _TIE * mean

    best = [begin[slot] for slot in problem.slots]
    coarse = _coarse(problem, score, effort.moves, _deadline(effort, 0.3), rng)
    if coarse is not None:
        best = min(best, coarse, key=score)
    moves = _Moves(problem, rng)
    moves.use(best)
    fine = _anneal(moves, best, score, effort.moves, _deadline(effort, 0.4), rng)
    return dict(zip(problem.slots, min(best, fine, key=stopwatch), strict=True))


def _coarse(
    problem: RoutingProblem, score: Score, count: int, deadline: float, rng: random.Random
) -> list[Path] | None:
    """One path for all slots of each origin; None if there are too few nodes for that."""
    moves = _Moves(replace(problem, memory=1), rng)
    try:
        begun = moves.start()
    except ValueError:
        return None

    def spread(paths: Sequence[Path]) -> list[Path]:
        return [path for path in paths for _ in range(problem.memory)]

    return spread(_anneal(moves, begun, lambda paths: score(spread(paths)), count, deadline, rng))


def _deadline(effort: SearchEffort, share: float) -> float:
    return math.inf if effort.seconds is None else time.monotonic() + share * effort.seconds


def _anneal(
    moves: _Moves, begin: list[Path], score: Score, count: int, deadline: float, rng: random.Random
) -> list[Path]:
    """Simulated annealing: the best paths found in `count` moves."""
    now, best = list(begin), list(begin)
    value = least = score(now)
    hot = _HOT * value
    for number in range(count):
        if time.monotonic() > deadline:
            break
        changed = moves.change(now)
        if changed is None:
            continue
        after = list(now)
        for slot, path in changed.items():
            after[slot] = path
        temperature = hot * (_COLD / _HOT) ** (number / count)
        found = score(after)
        if found <= value or rng.random() < math.exp((value - found) / temperature):
            moves.take(now, after, changed)
            now, value = after, found
            if value < least:
                best, least = list(now), value
    return best


class _Moves:
    """Changes of a legal set of paths, one path for each slot."""

    def __init__(self, problem: RoutingProblem, rng: random.Random) -> None:
        self._problem, self._rng = problem, rng
        self._orders: dict[frozenset[int], list[tuple[int, ...]]] = {}
        """Legal orders of the later stages, by their set."""
        for order in legal_orders(len(problem.stages), problem.path_length, problem.rules):
            self._orders.setdefault(frozenset(order[1:]), []).append(order[1:])
        self._loads: Counter[int] = Counter()
        self._trip = cache(problem.round_trip)
        self._later = [node for stage in problem.stages[1:] for node in stage]

    def start(self) -> list[Path]:
        """Random paths, by the free room of each stage."""
        problem, rng = self._problem, self._rng
        later = problem.path_length - 1
        sets = sorted(tuple(sorted(stages)) for stages in self._orders)
        room = {number: len(stage) * problem.memory for number, stage in enumerate(problem.stages) if number}
        free = dict.fromkeys(self._later, problem.memory)
        paths = []
        for origin, _ in problem.slots:
            usable = [stages for stages in sets if all(room[stage] for stage in stages)]
            if not usable:
                visits = len(problem.slots) * later
                raise ValueError(
                    f"there are no legal paths: {len(problem.slots)} slots need {visits} places at later stages "
                    f"and find {len(self._later) * problem.memory}; choose path_length = {problem.path_length - 1} "
                    "or less, or fewer nodes at stage 0, the origins"
                )
            most = max(sum(room[stage] for stage in stages) for stages in usable)
            stages = rng.choice([stages for stages in usable if sum(room[stage] for stage in stages) == most])
            path = [origin]
            for stage in rng.choice(self._orders[frozenset(stages)]):
                node = rng.choice([node for node in problem.stages[stage] if free[node]])
                free[node] -= 1
                room[stage] -= 1
                path.append(node)
            paths.append(tuple(path))
        self.use(paths)
        return paths

    def use(self, paths: Sequence[Path]) -> None:
        self._loads = Counter(node for path in paths for node in path)

    def take(self, before: Sequence[Path], after: Sequence[Path], changed: dict[int, Path]) -> None:
        for slot in changed:
            self._loads.subtract(before[slot])
            self._loads.update(after[slot])

    def change(self, paths: Sequence[Path]) -> dict[int, Path] | None:
        """New paths for one or two slots; None if this draw gives none."""
        if self._problem.path_length == 1:
            return None
        rng = self._rng
        slot, draw = rng.randrange(len(paths)), rng.random()
        if draw < 0.2:
            return self._reordered(paths, slot)
        if draw < 0.4:
            return self._moved(paths, slot)
        return self._exchanged(paths, slot, rng.randrange(len(paths)))

    def _reordered(self, paths: Sequence[Path], slot: int) -> dict[int, Path] | None:
        path = paths[slot]
        others = [made for made in self._arranged(path[0], path[1:]) if made != path]
        return {slot: self._rng.choice(others)} if others else None

    def _moved(self, paths: Sequence[Path], slot: int) -> dict[int, Path] | None:
        """Replace a node of the path by one that has room."""
        path, rng = paths[slot], self._rng
        node = rng.choice(self._later)
        if self._loads[node] >= self._problem.memory or node in path:
            return None
        index = rng.randrange(1, len(path))
        new = self._fitted(path[0], (*path[1:index], *path[index + 1 :], node))
        return None if new is None else {slot: new}

    def _exchanged(self, paths: Sequence[Path], one: int, other: int) -> dict[int, Path] | None:
        rng, mine, theirs = self._rng, paths[one], paths[other]
        a, b = rng.randrange(1, len(mine)), rng.randrange(1, len(theirs))
        if one == other or mine[a] == theirs[b]:
            return None
        first = self._fitted(mine[0], (*mine[1:a], *mine[a + 1 :], theirs[b]))
        second = self._fitted(theirs[0], (*theirs[1:b], *theirs[b + 1 :], mine[a]))
        return None if first is None or second is None else {one: first, other: second}

    def _fitted(self, origin: int, nodes: tuple[int, ...]) -> Path | None:
        """A path over `nodes`, mostly the fastest alone; None where their stages have no legal order."""
        made = list(self._arranged(origin, nodes))
        if not made:
            return None
        return self._rng.choice(made) if self._rng.random() < 0.2 else min(made, key=self._trip)

    def _arranged(self, origin: int, nodes: tuple[int, ...]) -> Iterator[Path]:
        by_stage = {self._problem.stage_of[node]: node for node in nodes}
        if len(by_stage) == len(nodes):
            for order in self._orders.get(frozenset(by_stage), ()):
                yield (origin, *(by_stage[stage] for stage in order))


@dataclass(frozen=True, kw_only=True)
class RoutingStrategy:
    """One strategy. played: a step on shared links. seconds: of a step; the mean if latencies vary. planning: seconds
    of the search. paths: of the slots; None: it has none.
    """

    name: str
    routes: Sequence[Route]
    played: Replay
    seconds: float
    planning: float
    paths: Paths | None = None

    def sent(self, sizes: Sizes) -> Counter[int]:
        return bytes_sent(self.routes, sizes)


def routing_strategies(
    problem: RoutingProblem, effort: SearchEffort, seed: int = 0, network: PlanNetwork | None = None
) -> list[RoutingStrategy]:
    """Four strategies, each with the seconds of its step.

    The search ignores that messages share links. The plan is the better on `network` of two sets of paths: those that
    are fast alone, and those found with collisions counted.

    Args:
        problem: the nodes.
        effort: how long to search.
        seed: of the search.
        network: links that messages share; None: each message takes the problem's delay.

    Returns:
        Fixed pipelines, random paths, paths that are fast alone, and the plan.

    Raises:
        ValueError: where no legal paths fit.
    """
    began = time.monotonic()
    by_chance = blind(problem, seed)
    drawn = time.monotonic()
    alone = without_collisions(problem, effort, seed)
    fitted = time.monotonic()
    best = with_collisions(problem, effort, alone, seed)
    done = time.monotonic()
    without = _replayed("without", problem, network, alone, fitted - drawn)
    plan = _replayed("with", problem, network, best, done - drawn)
    if without.seconds < plan.seconds:
        plan = replace(without, name="with", planning=done - drawn)
    return [full(problem, network), _replayed("random", problem, network, by_chance, drawn - began), without, plan]


def full(problem: RoutingProblem, network: PlanNetwork | None = None) -> RoutingStrategy:
    """Fixed pipelines; microbatches are distributed over their slots in turn."""
    pipelines = aligned(problem.stages, problem.delays, problem.forward)
    latest: dict[int, int] = {}
    routes = []
    for number in range(problem.microbatches):
        slot = number % (len(pipelines) * problem.memory)
        routes.append(Route(number, pipelines[slot % len(pipelines)], True, latest.get(slot)))
        latest[slot] = number
    return _replayed("full", problem, network, routes)


def _replayed(
    name: str,
    problem: RoutingProblem,
    network: PlanNetwork | None,
    found: Paths | Sequence[Route],
    planning: float = 0.0,
) -> RoutingStrategy:
    """found: paths of the slots, or the routes of a step."""
    paths = found if isinstance(found, Mapping) else None
    routes = found if isinstance(found, Sequence) else routes_of(found, problem.waves)
    played = [replay_routes(problem, routes)] if network is None else network.replays(problem, routes)
    seconds = fmean(step.makespan for step in played)
    return RoutingStrategy(name=name, routes=routes, played=played[0], seconds=seconds, planning=planning, paths=paths)
