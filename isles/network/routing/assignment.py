"""Which node takes which stage: a genetic search, as DT-FM's (Yuan et al., arXiv 2206.01288) with SkipPipe's score.

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
from collections.abc import Sequence
from itertools import pairwise
from operator import add

Stages = tuple[tuple[int, ...], ...]
CostMatrix = Sequence[Sequence[float]]

MOST_STAGES = 10
"""Of the exact tour, whose cost doubles with every stage."""
_POPULATION, _CHILDREN, _INHERITED = 6, 12, 5
_EXCHANGES = 200
"""Tried in a round of improvement, at most."""


class Scores:
    """The score of an assignment. delays and forward: as in `RoutingProblem`; pairings are remembered."""

    def __init__(self, delays: CostMatrix, forward: Sequence[float]) -> None:
        self._delays, self._forward = delays, forward
        self._pairings: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def __call__(self, stages: Stages) -> float:
        """Of stages, the first of which has the origins; the order of the others does not count."""
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

    def _pairing(self, one: tuple[int, ...], other: tuple[int, ...]) -> float:
        if one == other:
            return 0.0
        known = self._pairings.get((one, other))
        if known is None:
            costs = [[self._delays[u][v] + self._forward[u] for v in other] for u in one]
            known = self._pairings[one, other] = bottleneck(costs)[0]
        return known


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
    """Row by column of a largest matching of pairs that cost `most` or less."""
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
    """Stages of `sizes` nodes, in the order of their tour, with a low score. seconds: after which what is found counts.
    ValueError where sizes do not fit.
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
    """The stages of `other`, but for some nodes that are where `one` has them."""
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
    """Exchanges of two nodes, each taken where it makes the score less, until none in a round helped."""
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
