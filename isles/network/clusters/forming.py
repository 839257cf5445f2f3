"""Which nodes share a copy of the model: as many clusters as the nodes' memory allows, as alike in speed as can be.

Ravnest's public code lowers a penalty that one cluster of all nodes always brings to nothing, so how many clusters come
out is luck there. Here three things count, in this order:

    1. every cluster holds the whole model, cut somewhere between its blocks (`split_model`)
    2. as many clusters as can be, up to a limit
    3. the slowest cluster's predicted step time as close as can be to the fastest one's, for averaging waits for all;
       then the shortest way between any two nodes of a cluster, then the shortest step

All nodes are used. Up to eight of them every grouping is looked at; above, a genetic search from a seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from isles.network.clusters.nodes import ClusterNode
from isles.network.clusters.splitting import CutBy, ModelLoad, ModelSplit, split_model

EXACT = 8
"""Nodes up to which every grouping is looked at: 4,140 of eight."""

Grouping = tuple[int, ...]
"""By node, the number of its cluster."""


@dataclass(frozen=True, slots=True)
class NodeCluster:
    """One copy of the model. nodes: by number, in the order of their stages; the first has the text, the last the
    loss.
    """

    nodes: tuple[int, ...]
    split: ModelSplit

    @property
    def seconds(self) -> float:
        """Of a microbatch at its slowest stage, as predicted."""
        return max(self.split.seconds)


class ClusterScore(NamedTuple):
    """Of a grouping; the least is best. homeless: clusters that do not hold the model. clusters: their number,
    negative. spread: slowest over fastest. latency: longest way inside of a cluster, seconds. seconds: of the slowest.
    """

    homeless: int
    clusters: int
    spread: float
    latency: float
    seconds: float


def form_clusters(
    nodes: Sequence[ClusterNode],
    load: ModelLoad,
    *,
    most: int = 5,
    method: Literal["auto", "exact", "genetic"] = "auto",
    by: CutBy = "time",
    seed: int = 0,
) -> list[NodeCluster]:
    """The clusters, that of the first node first. most: how many at most. by: how each is cut. seed: of the genetic
    search. ValueError, one line, where no grouping holds the model, or for a limit below 1.
    """
    if most < 1:
        raise ValueError(f"most = {most}: choose 1 cluster or more")
    if not nodes:
        raise ValueError("no node: name one or more")
    bench = _Bench(nodes, load, by)
    exact = method == "exact" or (method == "auto" and len(nodes) <= EXACT)
    best = min(groupings(len(nodes), most), key=bench.score) if exact else _evolved(bench, most, seed)
    if bench.score(best).homeless:
        raise ValueError(_why_not(nodes, load, most))
    clusters = [cluster for cluster in map(bench.cluster, members(best)) if cluster is not None]
    return sorted(clusters, key=lambda cluster: min(cluster.nodes))


def groupings(nodes: int, most: int) -> Iterator[Grouping]:
    """Every way to put nodes into at most so many clusters, each once."""

    def grown(done: Grouping, used: int) -> Iterator[Grouping]:
        if len(done) == nodes:
            yield done
            return
        for number in range(min(used + 1, most)):
            yield from grown((*done, number), max(used, number + 1))

    return grown((), 0)


def members(grouping: Grouping) -> list[frozenset[int]]:
    """The nodes of each cluster that has any."""
    found: dict[int, set[int]] = {}
    for node, number in enumerate(grouping):
        found.setdefault(number, set()).add(node)
    return [frozenset(inside) for inside in found.values()]


class _Bench:
    """What groupings are worth; each cluster is cut once."""

    def __init__(self, nodes: Sequence[ClusterNode], load: ModelLoad, by: CutBy) -> None:
        self.size, self._nodes, self._load, self._by = len(nodes), nodes, load, by
        self.cluster = cache(self._cluster)

    def _cluster(self, inside: frozenset[int]) -> NodeCluster | None:
        """The first stages keep the most versions of their weights, so the nodes with the most memory take them."""
        order = tuple(sorted(inside, key=lambda number: (-self._nodes[number].memory, number)))
        split = split_model(self._load, [self._nodes[number] for number in order], self._by)
        return None if split is None else NodeCluster(order, split)

    def score(self, grouping: Grouping) -> ClusterScore:
        groups = members(grouping)
        made = [self.cluster(inside) for inside in groups]
        whole = [cluster for cluster in made if cluster is not None]
        if len(whole) < len(made):
            return ClusterScore(len(made) - len(whole), 0, math.inf, math.inf, math.inf)
        slowest, fastest = max(one.seconds for one in whole), min(one.seconds for one in whole)
        spread = round(slowest / fastest, 9)  # so that equal ones are equal
        return ClusterScore(0, -len(whole), spread, max(map(self._latency, groups)), slowest)

    def _latency(self, inside: frozenset[int]) -> float:
        farthest = sorted((self._nodes[number].latency for number in inside), reverse=True)[:2]
        return sum(farthest) if len(farthest) == 2 else 0.0


_POPULATION, _GENERATIONS, _PATIENCE = 80, 200, 30
_TOURNAMENT, _MUTATION = 5, 0.05


def _evolved(bench: _Bench, most: int, seed: int) -> Grouping:
    """By a genetic search: tournaments of five, one-point crossover, a gene in twenty drawn anew, the best one kept;
    in each generation one child, and one stranger, go on node by node to where no move and no exchange of two is
    better. It ends where thirty generations brought nothing. It begins with all in one cluster among draws.
    """
    draw = random.Random(seed)
    ids = range(min(most, bench.size))
    people = [(0,) * bench.size]
    people += [_renamed([draw.choice(ids) for _ in range(bench.size)]) for _ in range(_POPULATION - 1)]
    best, since = _climbed(bench, min(people, key=bench.score), ids), 0
    for _ in range(_GENERATIONS):
        scores = {one: bench.score(one) for one in people}

        def parent(people: Sequence[Grouping] = people, scores: dict[Grouping, ClusterScore] = scores) -> Grouping:
            return min(draw.sample(people, _TOURNAMENT), key=scores.__getitem__)

        children = [best]
        while len(children) < _POPULATION:
            cut = draw.randrange(bench.size)
            child = parent()[:cut] + parent()[cut:]
            children.append(_renamed([draw.choice(ids) if draw.random() < _MUTATION else gene for gene in child]))
        children[-1] = _climbed(bench, children[-1], ids)
        children[-2] = _climbed(bench, _renamed([draw.choice(ids) for _ in range(bench.size)]), ids)
        people = children
        leader = min(people, key=bench.score)
        since = 0 if bench.score(leader) < bench.score(best) else since + 1
        best = leader
        if since == _PATIENCE:
            break
    return best


def _renamed(numbers: Sequence[int]) -> Grouping:
    """Clusters numbered in the order in which nodes name them, so that parents mean the same by a number."""
    names: dict[int, int] = {}
    return tuple(names.setdefault(number, len(names)) for number in numbers)


def _climbed(bench: _Bench, grouping: Grouping, ids: Sequence[int]) -> Grouping:
    """The best that single moves and exchanges lead to, the best one first each time."""
    while True:
        near = min(_near(grouping, ids), key=bench.score, default=grouping)
        if not bench.score(near) < bench.score(grouping):
            return grouping
        grouping = near


def _near(grouping: Grouping, ids: Sequence[int]) -> Iterator[Grouping]:
    for node, own in enumerate(grouping):
        for number in ids:
            if number != own:
                yield _renamed([*grouping[:node], number, *grouping[node + 1 :]])
        for other in range(node):
            if grouping[other] != own:
                swapped = list(grouping)
                swapped[node], swapped[other] = swapped[other], own
                yield _renamed(swapped)


def _why_not(nodes: Sequence[ClusterNode], load: ModelLoad, most: int) -> str:
    together = sum(node.memory for node in nodes)
    have, need = f"{together / 1e9:.3g} GB", f"{load.least / 1e9:.3g} GB"
    if together < load.least:
        return f"{len(nodes)} nodes offer {have}, one copy of the model takes {need} or more: add nodes, or memory"
    if len(nodes) > most * load.blocks:
        return (
            f"{len(nodes)} nodes in {most} clusters at most, of {load.blocks} blocks each: some would hold none; allow "
            "more clusters, or leave nodes out"
        )
    return (
        f"{len(nodes)} nodes offer {have}, one copy of the model takes {need} or more, but no cut between its "
        f"{load.blocks} blocks gives each node what it holds: add memory to the smallest, or leave it out"
    )
