"""What a model asks of the nodes that share it, by block: counted on a sketch, which takes no memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from isles.models.cuts import PieceCosts, pieces
from isles.models.stages import Stage
from isles.network.clusters.splitting import ModelLoad


def load_of(sketch: nn.Module, costs: PieceCosts, *, sequences: int, length: int, states: float) -> ModelLoad:
    """Of `sketch` (on the meta device), by microbatches of so many sequences of `length` tokens. costs: of a token.
    states: bytes of the optimizer's state for each byte of weights. ValueError for a model that cannot be cut.
    """
    layers = len(costs.blocks)
    blocks = [Stage(sketch, piece) for piece in pieces(range(1, layers), layers, loss_at_origin=False)]
    x = targets = torch.zeros(sequences, length, dtype=torch.int64, device="meta")
    saved, stream = [], 0
    for block in blocks:
        stream = max(stream, x.nbytes if x.is_floating_point() else 0)
        x, kept = _saved(block, x, targets)
        saved.append(float(kept))
    return ModelLoad(
        flops=tuple(sequences * length * cost for cost in costs.to_cut(loss_at_origin=False)),
        weights=tuple(float(sum(parameter.nbytes for parameter in block.parameters())) for block in blocks),
        saved=tuple(saved),
        stream=float(stream),
        states=states,
    )


def _saved(block: Stage, x: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """What comes out, and the bytes that its forward pass keeps for the backward pass beside weights."""
    weights = {parameter.untyped_storage()._cdata for parameter in block.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    same: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
    piece = block.piece
    with torch.autograd.graph.saved_tensors_hooks(keep, same):
        start = x if piece.enters else x.detach().requires_grad_()
        out = block(start, targets if piece.leaves else None, enter=piece.enters, leave=piece.leaves)
    nbytes = sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in weights)
    return out.detach(), nbytes
