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
from itertools import accumulate, pairwise
from typing import Literal, get_args

from isles.network.clusters.nodes import ClusterNode

CutBy = Literal["time", "memory"]
SPLITS: tuple[CutBy, ...] = get_args(CutBy)


@dataclass(frozen=True, kw_only=True)
class ModelLoad:
    """What a model asks of the nodes that share it, by block, with what enters at the first and leaves at the last.

    flops: of the forward pass of a microbatch. weights: bytes. saved: bytes that a forward pass keeps for the backward
    pass of one microbatch. stream: bytes of a microbatch between two blocks. states: bytes of the optimizer's state for
    each byte of weights (AdamW 2, SGD 0).
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
        """How many there are."""
        return len(self.flops)

    @property
    def least(self) -> float:
        """Bytes that one cluster takes at least, however it is cut: one version of everything."""
        return sum(self.weights) * (2 + self.states) + max(self.saved)


class _Costs:
    """Sums over runs of blocks."""

    def __init__(self, load: ModelLoad, nodes: Sequence[ClusterNode]) -> None:
        self.load, self.nodes = load, nodes
        self.flops, self.weights, self.saved = (
            [0.0, *accumulate(values)] for values in (load.flops, load.weights, load.saved)
        )

    def seconds(self, stage: int, first: int, stop: int) -> float:
        """Of one microbatch at a node."""
        last, node = stage == len(self.nodes) - 1, self.nodes[stage]
        sent = (stage > 0) + (not last)
        forward = (self.flops[stop] - self.flops[first]) / node.speed
        return (3 if last else 4) * forward + sent * 8 * self.load.stream / node.bandwidth

    def nbytes(self, stage: int, first: int, stop: int) -> float:
        """That it takes there."""
        versions = len(self.nodes) - stage
        weights = self.weights[stop] - self.weights[first]
        saved = self.saved[stop] - self.saved[first]
        return weights * (versions + 1 + self.load.states) + versions * self.load.stream + saved

    def filled(self, stage: int, first: int, stop: int) -> float:
        """The share of the node's memory that this is."""
        return self.nbytes(stage, first, stop) / self.nodes[stage].memory


@dataclass(frozen=True, slots=True)
class ModelSplit:
    """cuts: the first block of each stage but the first. seconds: of a microbatch at each stage, as predicted; fills:
    shares of the nodes' memory.
    """

    cuts: tuple[int, ...]
    seconds: tuple[float, ...]
    fills: tuple[float, ...]


def split_model(load: ModelLoad, nodes: Sequence[ClusterNode], by: CutBy = "time") -> ModelSplit | None:
    """Cut the model for `nodes`, which take the stages in this order, so that the slowest stage is as fast as can be
    ("time"), or the fullest node as empty ("memory"), and each holds its share; None where no cut does.
    """
    costs = _Costs(load, nodes)
    cuts = _best(load.blocks, len(nodes), costs.seconds if by == "time" else costs.filled, costs.filled)
    if cuts is None:
        return None
    runs = list(enumerate(pairwise([0, *cuts, load.blocks])))
    return ModelSplit(
        cuts=tuple(cuts),
        seconds=tuple(costs.seconds(stage, *run) for stage, run in runs),
        fills=tuple(costs.filled(stage, *run) for stage, run in runs),
    )


def fill(load: ModelLoad, cuts: Sequence[int], stage: int, node: ClusterNode) -> float:
    """The share of a node's memory that one stage of a cluster cut there takes."""
    bounds = [0, *cuts, load.blocks]
    return _Costs(load, [node] * (len(cuts) + 1)).filled(stage, bounds[stage], bounds[stage + 1])


def _best(
    blocks: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    filled: Callable[[int, int, int], float],
) -> list[int] | None:
    if stages > blocks:
        return None

    def of(stage: int, first: int, stop: int) -> float:
        return cost(stage, first, stop) if filled(stage, first, stop) <= 1 else math.inf

    best = [math.inf, *(of(0, 0, stop) for stop in range(1, blocks + 1))]
    starts: list[list[int]] = []
    for stage in range(1, stages):
        row, begins = [math.inf] * (blocks + 1), [0] * (blocks + 1)
        for stop in range(stage + 1, blocks + 1):
            row[stop], begins[stop] = min(
                (max(best[first], of(stage, first, stop)), first) for first in range(stage, stop)
            )
        best = row
        starts.append(begins)
    if math.isinf(best[blocks]):
        return None
    cuts, stop = [], blocks
    for begins in reversed(starts):
        stop = begins[stop]
        cuts.append(stop)
    return cuts[::-1]
