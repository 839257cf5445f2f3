"""The places where a model is cut into stages, and the piece that each stage has. Loads no torch, for planners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from isles.models.sizes import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of a model that a stage has. blocks: [start, stop). enters: it turns tokens into the stream. leaves: it
    computes logits and loss from the stream.
    """

    blocks: range
    enters: bool
    leaves: bool


def pieces(cuts: Sequence[int], layers: int, *, loss_at_origin: bool, key: str = "pipeline.cut") -> list[Piece]:
    """The pieces of a model of `layers` blocks, cut before the blocks `cuts`. loss_at_origin: the first piece also
    computes the loss, so that an embedding tied to the head stays in one place. key: the setting to name in errors.

    ValueError for cuts that leave a stage without a block.
    """
    bounds = [0, *cuts, layers]
    if any(stop <= start for start, stop in pairwise(bounds)):
        raise ValueError(
            f"{key} = {list(cuts)}: name rising numbers of blocks between 1 and {layers - 1}, one for each "
            "stage after the first"
        )
    count = len(bounds) - 1
    return [
        Piece(
            blocks=range(bounds[stage], bounds[stage + 1]),
            enters=stage == 0,
            leaves=stage == (0 if loss_at_origin else count - 1),
        )
        for stage in range(count)
    ]


def cut_points(costs: Sequence[float], stages: int) -> list[int]:
    """The cuts into `stages` runs of one or more blocks that make the slowest stage as fast as possible. Among equals,
    the cuts whose later stages are lighter. Exact, by dynamic programming. costs: of each block, in any unit, with the
    costs of entering and leaving. ValueError for more stages than blocks.
    """
    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"pipeline.stages = {stages}: the model has {layers} blocks, so choose 1 to {layers}")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[n]: (cost of the slowest stage, start of the last stage) for the first n blocks in `count` stages
    best = [(total[n], 0) for n in range(layers + 1)]
    starts: list[list[int]] = []
    for count in range(2, stages + 1):
        row = [(float("inf"), 0)] * count
        row += [
            min((max(best[k][0], total[n] - total[k]), -k) for k in range(count - 1, n))
            for n in range(count, layers + 1)
        ]
        best = [(slowest, -k) for slowest, k in row]
        starts.append([k for _, k in best])
    cuts, stop = [], layers
    for row_starts in reversed(starts):
        stop = row_starts[stop]
        cuts.append(stop)
    return cuts[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceCosts:
    """FLOPs of a token's forward pass, or costs in another unit: of each block, and of the head."""

    blocks: tuple[float, ...]
    head: float

    @property
    def total(self) -> float:
        return sum(self.blocks) + self.head

    def to_cut(self, *, loss_at_origin: bool) -> list[float]:
        """Costs of each block, with the head's added to the block next to the loss."""
        costs = list(self.blocks)
        costs[0 if loss_at_origin else -1] += self.head
        return costs


def decoder_costs(shape: Shape) -> PieceCosts:
    """Costs of the decoder: matrix products, and attention over half of the context on average."""
    attention = 2 * shape.context * shape.d_model
    matrices = 2 * (4 * shape.d_model**2 + 3 * shape.d_model * shape.ffn)
    return PieceCosts(blocks=(float(attention + matrices),) * shape.layers, head=2.0 * shape.d_model * shape.vocab)
