"""Where a model is cut for a row of unequal nodes: exact, by dynamic programming over blocks.

What stage s of S takes, asynchronous, with S microbatches in flight and forward passes run again (see
`isles.pipeline.ravnest`):

    seconds    4 forwards of its blocks (the pass, the pass again, a backward of two), 3 at the last, which keeps its
               own; and a microbatch's stream over the node's line, once for each neighbour
    bytes      weights x (S - s versions + 1 gradient + optimizer states) + one input for each of S - s microbatches
               + what its blocks keep for one backward pass
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from isles.network.clusters.nodes import ClusterNode

CutBy = Literal["time", "memory"]
FloatMatrix = NDArray[np.float64]
SPLITS: tuple[CutBy, ...] = get_args(CutBy)


@dataclass(frozen=True, kw_only=True)
class ModelLoad:
    """What a model asks of the nodes that share it, by block, with what enters at the first and leaves at the last.

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
        """Bytes that one cluster takes at least, however it is cut: one version of everything."""
        return sum(self.weights) * (2 + self.states) + max(self.saved)


@dataclass(frozen=True, slots=True)
class ModelSplit:
    """cuts: the first block of each stage but the first. seconds: of a microbatch at each stage, as predicted; fills:
    shares of the nodes' memory.
    """

    cuts: tuple[int, ...]
    seconds: tuple[float, ...]
    fills: tuple[float, ...]


class ClusterCutter:
    """Cuts one model for one row of nodes after another. What a run of blocks costs a node is computed once for all
    rows in which it takes that place. by: "time", so that the slowest stage is as fast as can be, or "memory", so that
    the fullest node is as empty.
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
        self._filled = cache(self._stage_filled)

    def seconds(self, node: ClusterNode, versions: int, is_first: bool) -> FloatMatrix:
        """[stop, first]: of one microbatch. versions: of its weights that a stage keeps, 1 at the last."""
        forward = self._flops / node.speed
        sent = (not is_first) + (versions > 1)
        return (4 if versions > 1 else 3) * forward + sent * 8 * self.load.stream / node.bandwidth

    def filled(self, node: ClusterNode, versions: int) -> FloatMatrix:
        """[stop, first]: the share of the node's memory that this takes."""
        nbytes = self._weights * (versions + 1 + self.load.states) + versions * self.load.stream + self._saved
        return nbytes / node.memory

    def _stage_filled(self, node: ClusterNode, versions: int, is_first: bool) -> FloatMatrix:
        return np.where(self._empty, math.inf, self.filled(node, versions))

    def _stage_cost(self, node: ClusterNode, versions: int, is_first: bool) -> FloatMatrix:
        filled = self.filled(node, versions)
        cost = self.seconds(node, versions, is_first) if self._by == "time" else filled
        return np.where(self._empty | (filled > 1), math.inf, cost)

    def worst(self, nodes: Sequence[ClusterNode]) -> float:
        """Of the best cut: seconds of the slowest stage, or the share of the fullest node; infinity: no cut does."""
        rows = self._rows(nodes, self._cost)
        return float(rows[-1][-1]) if rows else math.inf

    def least_filled(self, nodes: Sequence[ClusterNode]) -> float:
        """The least share of the fullest node over all cuts, above 1 too; infinity: more nodes than blocks."""
        rows = self._rows(nodes, self._filled)
        return float(rows[-1][-1]) if rows else math.inf

    def split(self, nodes: Sequence[ClusterNode]) -> ModelSplit | None:
        """The best cut for nodes that take the stages in this order; None where none gives each what it holds."""
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
        """[stage][stop - stage - 1]: the worst of the stages so far, if they end there, so that each of these and of
        those behind has a block; nothing where there are too few blocks.
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
