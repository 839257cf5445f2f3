"""Unequal nodes grouped into clusters that each hold one copy of a model, cut to what its nodes can do (Ravnest, Menon
et al. 2024, arXiv 2401.01728). No torch.

`ClusterNode`: what a node reports about itself, in a table that `isles doctor --describe` writes.

[[node]]
name = "desk"
memory = "16GiB"            # that it gives to a run
speed = "120G"              # FLOP/s that a forward pass reaches
bandwidth = "40Mbit/s"      # of its own link, the slower direction
latency = "12ms"            # one way, to the middle of the network; left out: 0

`encode_node` packs it into 8 bytes, so that nodes exchange it as one number: four logarithms.

bit 0        1: a node is present; the number 1 alone: no figures
15 bits each memory, speed, bandwidth, latency in nanoseconds: 512 log2(1 + amount), so to 0.07 %

`ClusterCutter`: where a model is cut for a row of nodes; exact, by dynamic programming over blocks. The cost of stage s
of S, asynchronous, with S microbatches in flight and recomputed forward passes (see
`isles.pipeline.ravnest`):

    seconds    4 forwards of its blocks (the pass, the recomputation, a backward of two), 3 at the last stage, which
               keeps its activations; and a microbatch's stream over the node's link, once for each neighbour
    bytes      weights x (S - s versions + 1 gradient + optimizer states) + one input for each of S - s microbatches
               + what its blocks keep for one backward pass

`form_clusters`: which nodes share a copy of the model; as many clusters as the nodes' memory allows, as alike in speed
as can be. The penalty in Ravnest's public code is 0 for a single cluster of all nodes, so the number of clusters is
luck there. Here three criteria count, in this order:

    1. every cluster holds the whole model, cut somewhere between its blocks (`ClusterCutter`)
    2. as many clusters as can be, up to a limit
    3. the slowest cluster's predicted step time as close as can be to the fastest one's, because averaging waits for
       all; then the longest latency inside a cluster, then the step time

All nodes are used. For up to eight nodes every grouping is tried; above, a local search from a seed.

`ClusterGrowth` forms clusters of nodes that join a running run:

    all nodes described        as `form_clusters` groups them, eight at a time, those with the most memory first; the
                               smallest stay out if they prevent it
    else                       the cut of a training cluster, the shortest first, in the order in which nodes joined
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from isles.base.errors import demand
from isles.base.tables import read_toml, typed
from isles.network.units import parse_amount, parse_bytes, parse_latency, parse_rate

_Amount = float | str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterNode:
    """A machine that may serve a stage.

    Args:
        name: for display.
        memory: bytes.
        speed: FLOP/s of a forward pass.
        bandwidth: bits per second.
        latency: seconds one way to the middle of the network, so that two nodes are as far apart as theirs together.

    Raises:
        ValueError: beginning with the field's name, for an impossible value.
    """

    name: str
    memory: float
    speed: float
    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        demand(self, "memory speed bandwidth", lambda x: x > 0, "choose a number above 0")
        demand(self, "latency", lambda x: x >= 0, "choose 0 s or more")

    def to_toml(self) -> str:
        """The table that `read_nodes` reads back."""
        return (
            f'[[node]]\nname = "{self.name}"\nmemory = {round(self.memory)}\nspeed = "{self.speed / 1e9:.4g}G"\n'
            f'bandwidth = "{self.bandwidth / 1e6:.6g}Mbit/s"\nlatency = "{1e3 * self.latency:.4g}ms"\n'
        )


@dataclass(frozen=True, kw_only=True)
class _NodeTable:
    name: str
    memory: _Amount
    speed: _Amount
    bandwidth: _Amount
    latency: _Amount = 0.0


def read_nodes(path: str) -> list[ClusterNode]:
    """The nodes of a file, in its order.

    Args:
        path: of a TOML file of tables [[node]], see `ClusterNode.to_toml`.

    Raises:
        ValueError: in one line that begins with the path, for anything that is wrong.
    """
    tables = read_toml(path)
    try:
        return _nodes(tables)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _nodes(tables: dict[str, Any]) -> list[ClusterNode]:
    found = tables.pop("node", None)
    if tables:
        raise ValueError(f"{next(iter(tables))}: write [[node]] above each node's keys, and nothing else")
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise ValueError("no node: write [[node]] above each node's keys; `isles doctor --describe` writes this one's")
    nodes = [_node(f"node {number}", one) for number, one in enumerate(found, start=1)]
    name, times = Counter(node.name for node in nodes).most_common(1)[0]
    if times > 1:
        raise ValueError(f"name = {name!r} stands for {times} nodes: give each its own")
    return nodes


def _node(where: str, table: dict[str, Any]) -> ClusterNode:
    made: _NodeTable = typed(where, _NodeTable, table)
    try:
        return ClusterNode(
            name=made.name,
            memory=parse_bytes("memory", made.memory),
            speed=parse_amount("speed", made.speed),
            bandwidth=parse_rate("bandwidth", made.bandwidth),
            latency=parse_latency("latency", made.latency),
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


NO_FIGURES = 1
"""The encoding of a node that is present and reports no figures."""
_BITS, _FINE, _SHIFTS = 15, 512, (1, 16, 31, 46)
_END = 1 << 61


def encode_node(node: ClusterNode | None) -> int:
    """The node as a number above 0 and below 2**61."""
    if node is None:
        return NO_FIGURES
    amounts = (node.memory, node.speed, node.bandwidth, 1e9 * node.latency)
    codes = (min(round(_FINE * math.log2(1 + amount)), (1 << _BITS) - 1) for amount in amounts)
    return NO_FIGURES | sum(code << shift for code, shift in zip(codes, _SHIFTS, strict=True))


def is_encoded_node(number: int) -> bool:
    """Whether `number` can be an encoded node."""
    return 0 < number < _END and bool(number & 1)


def decode_node(number: int, name: str) -> ClusterNode | None:
    """The node of this encoding; None for one without figures, or without memory, speed or bandwidth."""
    codes = (number >> shift & (1 << _BITS) - 1 for shift in _SHIFTS)
    memory, speed, bandwidth, nanoseconds = (2 ** (code / _FINE) - 1 for code in codes)
    if not min(memory, speed, bandwidth) > 0:
        return None
    return ClusterNode(name=name, memory=memory, speed=speed, bandwidth=bandwidth, latency=nanoseconds / 1e9)


CutBy = Literal["time", "memory"]
FloatMatrix = NDArray[np.float64]
SPLITS: tuple[CutBy, ...] = get_args(CutBy)


@dataclass(frozen=True, kw_only=True)
class ModelLoad:
    """What a model needs of the nodes that share it, by block; the embedding counts to the first, the head to the last.

    Args:
        flops: of the forward pass of a microbatch.
        weights: bytes.
        saved: bytes that a forward pass keeps for the backward pass of one microbatch.
        stream: bytes of a microbatch between two blocks.
        states: bytes of the optimizer's state for each byte of weights (AdamW 2, SGD 0).
    """

    flops: tuple[float, ...]
    weights: tuple[float, ...]
    saved: tuple[float, ...]
    stream: float
    states: float = 2.0

    def __post_init__(self) -> None:
        if not len(self.flops) == len(self.weights) == len(self.saved) > 0:
            raise ValueError("flops, weights and saved: give one number for each block, one block or more")

    @property
    def blocks(self) -> int:
        return len(self.flops)

    @property
    def least(self) -> float:
        """The least bytes of one cluster, however it is cut: one version of everything."""
        return sum(self.weights) * (2 + self.states) + max(self.saved)


@dataclass(frozen=True, slots=True)
class ModelSplit:
    """cuts: the first block of each stage but the first. seconds: predicted, of a microbatch at each stage; fills:
    shares of the nodes' memory.
    """

    cuts: tuple[int, ...]
    seconds: tuple[float, ...]
    fills: tuple[float, ...]


class ClusterCutter:
    """Cuts one model for one row of nodes after another. The cost of a run of blocks on a node is cached for all rows
    in which it has that place. by: "time": the slowest stage as fast as possible; "memory": the fullest node as empty
    as possible.
    """

    def __init__(self, load: ModelLoad, by: CutBy = "time") -> None:
        self.load, self._by = load, by
        flops, weights, saved = (
            np.array([0.0, *accumulate(values)]) for values in (load.flops, load.weights, load.saved)
        )
        # [stop, first] of every run of blocks, for the least over `first` is soonest found along a row of memory; what
        # has no block cannot be a stage
        self._flops, self._weights, self._saved = (sums[:, None] - sums[None, :] for sums in (flops, weights, saved))
        self._empty = np.tri(load.blocks + 1, dtype=bool).T
        self._cost = cache(self._stage_cost)
        self._filled = cache(lambda node, versions, _: np.where(self._empty, math.inf, self.filled(node, versions)))

    def seconds(self, node: ClusterNode, versions: int, is_first: bool) -> FloatMatrix:
        """[stop, first]: seconds of one microbatch. versions: of the weights that a stage keeps, 1 at the last."""
        forward = self._flops / node.speed
        sent = (not is_first) + (versions > 1)
        return (4 if versions > 1 else 3) * forward + sent * 8 * self.load.stream / node.bandwidth

    def filled(self, node: ClusterNode, versions: int) -> FloatMatrix:
        """[stop, first]: the share of the node's memory that this run of blocks takes."""
        nbytes = self._weights * (versions + 1 + self.load.states) + versions * self.load.stream + self._saved
        return nbytes / node.memory

    def _stage_cost(self, node: ClusterNode, versions: int, is_first: bool) -> FloatMatrix:
        filled = self.filled(node, versions)
        cost = self.seconds(node, versions, is_first) if self._by == "time" else filled
        return np.where(self._empty | (filled > 1), math.inf, cost)

    def worst(self, nodes: Sequence[ClusterNode]) -> float:
        """Cost of the best cut: seconds of the slowest stage, or share of the fullest node; infinity: no cut fits."""
        return self._least(nodes, self._cost)

    def least_filled(self, nodes: Sequence[ClusterNode]) -> float:
        """The least share of the fullest node over all cuts, above 1 too; infinity: more nodes than blocks."""
        return self._least(nodes, self._filled)

    def _least(self, nodes: Sequence[ClusterNode], of: Callable[[ClusterNode, int, bool], FloatMatrix]) -> float:
        rows = self._rows(nodes, of)
        return float(rows[-1][-1]) if rows else math.inf

    def split(self, nodes: Sequence[ClusterNode]) -> ModelSplit | None:
        """The best cut for nodes in this order of stages; None if no cut fits their memory."""
        rows, stages = self._rows(nodes, self._cost), len(nodes)
        if not rows or math.isinf(rows[-1][-1]):
            return None
        stop, cuts = self.load.blocks, [self.load.blocks]
        for stage in range(stages - 1, 0, -1):
            cost = self._cost(nodes[stage], stages - stage, False)
            stop = stage + int(np.argmin(np.maximum(rows[stage - 1][: stop - stage], cost[stop, stage:stop])))
            cuts.append(stop)
        runs = list(enumerate(pairwise([0, *cuts[::-1]])))
        seconds = (self.seconds(nodes[at], stages - at, not at)[stop, first] for at, (first, stop) in runs)
        fills = (self.filled(nodes[at], stages - at)[stop, first] for at, (first, stop) in runs)
        return ModelSplit(cuts=tuple(cuts[:0:-1]), seconds=tuple(map(float, seconds)), fills=tuple(map(float, fills)))

    def _rows(
        self, nodes: Sequence[ClusterNode], of: Callable[[ClusterNode, int, bool], FloatMatrix]
    ) -> list[FloatMatrix]:
        """[stage][stop - stage - 1]: the worst cost of the stages so far if they end at `stop`, leaving at least one
        block for each later stage; empty if there are too few blocks.
        """
        stages = len(nodes)
        width = self.load.blocks - stages + 1
        if width < 1:
            return []
        rows = [of(nodes[0], stages, True)[1 : width + 1, 0]]
        for stage in range(1, stages):
            cost = of(nodes[stage], stages - stage, False)
            ways = np.maximum(rows[-1], cost[stage + 1 : stage + width + 1, stage : stage + width])
            rows.append(ways.min(axis=1))
        return rows


def fill(load: ModelLoad, cuts: Sequence[int], stage: int, node: ClusterNode) -> float:
    """The share of a node's memory that one stage of a cluster cut there takes."""
    bounds = [0, *cuts, load.blocks]
    return float(ClusterCutter(load).filled(node, len(cuts) + 1 - stage)[bounds[stage + 1], bounds[stage]])


EXACT = 8
"""Up to so many nodes every grouping is tried: 4,140 of eight."""

Grouping = tuple[int, ...]
"""By node, the number of its cluster."""


@dataclass(frozen=True, slots=True)
class NodeCluster:
    """One copy of the model.

    Args:
        nodes: by number, in stage order; the first has the text, the last the loss.
        split: the model's blocks of each.
    """

    nodes: tuple[int, ...]
    split: ModelSplit

    @property
    def seconds(self) -> float:
        """Predicted seconds of a microbatch at the slowest stage."""
        return max(self.split.seconds)


class ClusterScore(NamedTuple):
    """The score of a grouping; the least is best.

    Args:
        lacking: summed over the clusters that do not hold the model: by what share of its memory the fullest node is
            exceeded.
        clusters: their number, negative.
        spread: slowest over fastest.
        latency: longest way inside of a cluster, seconds.
        seconds: of a microbatch at the slowest.
    """

    lacking: float
    clusters: int
    spread: float
    latency: float
    seconds: float


def form_clusters(
    nodes: Sequence[ClusterNode],
    load: ModelLoad,
    *,
    most: int = 5,
    method: Literal["auto", "exact", "search"] = "auto",
    by: CutBy = "time",
    seed: int = 0,
) -> list[NodeCluster]:
    """Put nodes together into clusters that each hold the model.

    Args:
        nodes: what there is.
        load: what the model asks of them.
        most: clusters at most.
        method: all groupings ("exact"), a search, or by the number of nodes.
        by: what each cluster's cut makes even, time or memory.
        seed: of the search.

    Returns:
        The clusters, that of the first node first.

    Raises:
        ValueError: in one line, where no grouping holds the model, or for a limit below 1.
    """
    if most < 1:
        raise ValueError(f"most = {most}: choose 1 cluster or more")
    if not nodes:
        raise ValueError("no node: name one or more")
    bench = _Bench(nodes, load, by)
    exact = method == "exact" or (method == "auto" and len(nodes) <= EXACT)
    best = min(groupings(len(nodes), most), key=bench.score) if exact else _searched(bench, min(most, len(nodes)), seed)
    if bench.score(best).lacking:
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


def members(grouping: Grouping) -> list[int]:
    """The nodes of each nonempty cluster, as a bit set."""
    found: dict[int, int] = {}
    for node, number in enumerate(grouping):
        found[number] = found.get(number, 0) | 1 << node
    return list(found.values())


class _ClusterWorth(NamedTuple):
    """Figures of a set of nodes. seconds: of a microbatch. latency: the longest. lacking: as in `ClusterScore`."""

    seconds: float
    latency: float
    lacking: float = 0.0


class _Bench:
    """Scores groupings; each cluster is cut once. A set of nodes is a bit set."""

    def __init__(self, nodes: Sequence[ClusterNode], load: ModelLoad, by: CutBy) -> None:
        self.size, self._nodes, self._by, self._cutter = len(nodes), nodes, by, ClusterCutter(load, by)
        # The first stages keep the most versions of their weights, so the nodes with the most memory take them.
        self._order = sorted(range(len(nodes)), key=lambda number: (-nodes[number].memory, number))
        self.worth = cache(self._worth)
        self.stages = 0
        """The number of stages of all clusters that were cut."""

    def cluster(self, inside: int) -> NodeCluster | None:
        """The cluster of these nodes; None if it does not hold the model."""
        order = tuple(number for number in self._order if inside >> number & 1)
        split = self._cutter.split([self._nodes[number] for number in order])
        return None if split is None else NodeCluster(order, split)

    def _worth(self, inside: int) -> _ClusterWorth:
        row = [self._nodes[number] for number in self._order if inside >> number & 1]
        self.stages += len(row)
        farthest = sorted((node.latency for node in row), reverse=True)[:2]
        latency = sum(farthest) if len(farthest) == 2 else 0.0
        seconds = self._cutter.worst(row)
        if math.isinf(seconds):
            return _ClusterWorth(seconds, latency, min(self._cutter.least_filled(row) - 1, _TOO_MANY * len(row)))
        if self._by == "memory":
            split = self._cutter.split(row)
            assert split is not None
            seconds = max(split.seconds)
        return _ClusterWorth(seconds, latency)

    def score(self, grouping: Grouping) -> ClusterScore:
        return _score([self.worth(inside) for inside in members(grouping)])


_TOO_MANY = 1e6
"""What each node of a cluster with fewer blocks than nodes counts as lacking."""


def _score(clusters: Sequence[_ClusterWorth], count: int | None = None) -> ClusterScore:
    """count: number of clusters, if `clusters` are not all. The score never decreases as more of them are known."""
    lacking = sum(one.lacking for one in clusters)
    if lacking:
        return ClusterScore(lacking, 0, math.inf, math.inf, math.inf)
    seconds, count = [one.seconds for one in clusters], len(clusters) if count is None else count
    if not seconds:
        return ClusterScore(0.0, -count, 1.0, 0.0, 0.0)
    slowest, fastest = max(seconds), min(seconds)
    spread = round(slowest / fastest, 9)  # so that equal ones are equal
    return ClusterScore(0.0, -count, spread, max(one.latency for one in clusters), slowest)


_STAGES, _STAGES_TO_FIT, _PATIENCE = 640_000, 40_000, 400
"""Stages to cut at most: once clusters hold the model (of 64 nodes a core cuts as many in 5 s or 6), and until
some do. Rounds without a better grouping at most.
"""
_STRANGERS, _STRANGERS_OF_MANY, _MANY = 0.15, 0.5, 32
"""Share of the rounds that begin with a draw; and from so many nodes on, where kicks seldom leave where they begin."""
_LEAST_KICKS, _TRIES = 4, 1000
"""Changes tried in vain before a round ends: all that 24 nodes have, and near half of those of 64, where 400 ended many
rounds too soon.
"""


def _searched(bench: _Bench, most: int, seed: int) -> Grouping:
    """The best grouping into `most` clusters, or into fewer if there is none: an iterated local search. It starts from
    the best so far, changed by a few random moves and exchanges, or from a random grouping. It ends after so many
    rounds without improvement, or so many cut stages; sooner if no clusters hold the model by then.
    """
    best: Grouping = (0,) * bench.size
    for count in range(most, 1, -1):
        search = _Search(bench, count, random.Random(seed))
        found = search.run()
        if not bench.score(found).lacking:
            return found
    return best


class _Search:
    """Groupings into exactly `count` clusters."""

    def __init__(self, bench: _Bench, count: int, draw: random.Random) -> None:
        self._bench, self._count, self._draw = bench, count, draw
        size, self._before = bench.size, bench.stages
        self._changes = [(node, other) for node in range(size) for other in range(node)]
        self._changes += [(node, ~number) for node in range(size) for number in range(count)]

    def run(self) -> Grouping:
        strangers = _STRANGERS if self._bench.size < _MANY else _STRANGERS_OF_MANY
        best, least = self._climbed(self._drawn(), _TRIES)
        rounds = 0
        while rounds < _PATIENCE and not self._is_over(least):
            is_new = self._draw.random() < strangers
            found, score = self._climbed(self._drawn() if is_new else self._kicked(best), _TRIES)
            rounds += 1
            if score <= least:
                best, least, rounds = found, score, rounds if score == least else 0
        if not least.lacking:
            self._before = self._bench.stages
            best, _ = self._climbed(best, len(self._changes), is_strict=True)
        return tuple(best)

    def _is_over(self, least: ClusterScore) -> bool:
        return self._bench.stages - self._before > (_STAGES_TO_FIT if least.lacking else _STAGES)

    def _drawn(self) -> list[int]:
        """A random grouping in which each cluster has a node."""
        numbers = [*range(self._count)]
        numbers += [self._draw.randrange(self._count) for _ in range(self._bench.size - self._count)]
        self._draw.shuffle(numbers)
        return numbers

    def _kicked(self, grouping: Sequence[int]) -> list[int]:
        changed, draw = list(grouping), self._draw
        for _ in range(draw.randint(1, max(_LEAST_KICKS, len(changed) // 8))):
            node, other = draw.sample(range(len(changed)), 2)
            if draw.random() < 0.5 and changed.count(changed[node]) > 1:
                changed[node] = changed[other]
            else:
                changed[node], changed[other] = changed[other], changed[node]
        return changed

    def _climbed(self, grouping: list[int], patience: int, is_strict: bool = False) -> tuple[list[int], ClusterScore]:
        """The best grouping found by moving a node or exchanging two, until `patience` changes in a row, or all that
        exist, bring nothing better. Each change that is not worse is accepted: most leave the slowest stage and so the
        spread unchanged, and only after some of these one reduces it. Unless strict, latency and seconds count only
        once the spread cannot be reduced further.
        """
        sets, now = [0] * self._count, self._bench.score(tuple(grouping))
        for node, own in enumerate(grouping):
            sets[own] |= 1 << node
        changes, best, least = self._changes, list(grouping), now
        self._draw.shuffle(changes)
        index = tried = 0
        while tried < min(len(changes), patience) and not self._is_over(least):
            node, other = changes[index]
            index, tried = (index + 1) % len(changes), tried + 1
            own, to = grouping[node], ~other if other < 0 else grouping[other]
            both = 1 << node | (0 if other < 0 else 1 << other)
            if own == to or sets[own] == both:
                continue
            most = now if is_strict else now._replace(latency=math.inf, seconds=math.inf)
            score = self._changed(sets, {own: sets[own] ^ both, to: sets[to] ^ both}, most)
            if score is not None:
                now = score
                for number in (own, to):
                    sets[number] ^= both
                grouping[node] = to
                if other >= 0:
                    grouping[other] = own
                if now < least:
                    best, least, tried = list(grouping), now, 0
        return best, least

    def _changed(self, sets: Sequence[int], changed: Mapping[int, int], most: ClusterScore) -> ClusterScore | None:
        """The score with some sets changed; None as soon as it is known to be above `most`."""
        worth = self._bench.worth
        known = [worth(inside) for number, inside in enumerate(sets) if number not in changed]
        score = _score(known, self._count)
        if math.isinf(most.latency) and score[:3] == most[:3]:
            return None  # the slowest and the fastest, or all that lack memory, are among the unchanged sets
        for inside in changed.values():
            if score > most:
                return None
            known.append(worth(inside))
            score = _score(known, self._count)
        return score if score <= most else None


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


Cuts = tuple[int, ...]
"""The cuts of a cluster: the first block of each stage but the first."""


class NewCluster(NamedTuple):
    """nodes: by number, in stage order."""

    nodes: tuple[int, ...]
    cuts: Cuts


@dataclass(frozen=True)
class ClusterGrowth:
    """load: of the model. spares: number of waiting nodes to keep. most: clusters at most, present ones included."""

    load: ModelLoad
    spares: int = 0
    most: int = 1 << 20

    def holds(self, node: ClusterNode | None, cuts: Cuts, stage: int) -> bool:
        """Whether a node has the memory for that stage; a node without figures is assumed to have it."""
        return node is None or fill(self.load, cuts, stage, node) <= 1

    def form(self, nodes: Sequence[ClusterNode | None], present: Sequence[Cuts]) -> list[NewCluster]:
        """The clusters that can be formed. present: cuts of those that train."""
        described = [node for node in nodes if node is not None]
        made = self._by_cut(nodes, present) if len(described) < len(nodes) else self._described(described)
        return made[: max(0, self.most - len(present))]

    def _described(self, nodes: Sequence[ClusterNode]) -> list[NewCluster]:
        order = sorted(range(len(nodes)), key=lambda number: (-nodes[number].memory, number))
        made: list[NewCluster] = []
        while order:
            found = self._of_the_largest(nodes, order[:EXACT])
            if not found:
                break
            made += found
            used = {number for cluster in found for number in cluster.nodes}
            order = [number for number in order if number not in used]
        return made

    def _of_the_largest(self, nodes: Sequence[ClusterNode], order: Sequence[int]) -> list[NewCluster]:
        for count in range(len(order), 0, -1):
            chosen = [nodes[number] for number in order[:count]]
            try:
                clusters = form_clusters(chosen, self.load, most=count, method="exact")
            except ValueError:
                continue  # so many do not hold it
            return [NewCluster(tuple(order[n] for n in cluster.nodes), cluster.split.cuts) for cluster in clusters]
        return []

    def _by_cut(self, nodes: Sequence[ClusterNode | None], present: Sequence[Cuts]) -> list[NewCluster]:
        made: list[NewCluster] = []
        free = list(range(len(nodes)))
        for cuts in sorted(set(present), key=lambda cuts: (len(cuts), cuts)):
            while (chosen := self._staffed(nodes, free, cuts)) is not None:
                made.append(NewCluster(chosen, cuts))
                free = [number for number in free if number not in chosen]
        return made

    def _staffed(self, nodes: Sequence[ClusterNode | None], free: Sequence[int], cuts: Cuts) -> tuple[int, ...] | None:
        """For each stage the first node with enough memory; None if a stage has none."""
        chosen: list[int] = []
        for stage in range(len(cuts) + 1):
            fits = (n for n in free if n not in chosen and self.holds(nodes[n], cuts, stage))
            found = next(fits, None)
            if found is None:
                return None
            chosen.append(found)
        return tuple(chosen)
