"""Which share of an inner step each task of a pipeline computes. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isles.models.cuts import Piece, PieceCosts
from isles.network.routing.replay import TaskSeconds


def task_shares(
    pieces: Sequence[Piece], costs: PieceCosts, microbatches: int, replicas: int, *, recompute: bool
) -> TaskSeconds:
    """The share of an inner step's computation in each task of each position: a backward pass costs two forward ones,
    and one more where that is run again; the loss comes with its gradient.
    """
    whole = 3 * costs.total * microbatches
    forward = [sum(costs.blocks[number] for number in piece.blocks) / whole for piece in pieces]
    loss = [3 * costs.head / whole if piece.leaves else 0.0 for piece in pieces]
    backward = [(3 if recompute else 2) * share for share in forward]
    return TaskSeconds(forward=forward * replicas, loss=loss * replicas, backward=backward * replicas)


@dataclass(frozen=True, slots=True)
class StageShares:
    """The share of an inner step's computation in an asynchronous stage's tasks: a forward pass, the backward pass with
    the forward where that is run again, and where the loss is, both at once.
    """

    forward: float
    backward: float
    both: float


def stage_shares(piece: Piece, costs: PieceCosts, microbatches: int, *, recompute: bool) -> StageShares:
    """Of a stage; see `task_shares`."""
    whole = 3 * costs.total * microbatches
    forward = sum(costs.blocks[number] for number in piece.blocks) / whole
    return StageShares(forward, (3 if recompute else 2) * forward, 3 * forward + 3 * costs.head / whole)
