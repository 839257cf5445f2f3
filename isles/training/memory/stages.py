"""What a stage of a pipelined run takes of a device: the profile that its plan of memory is made of."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from isles.memory.costs import Profile
from isles.memory.profile import StateBytes, profile
from isles.models import ModelConfig, limits, sketch
from isles.models.cuts import Piece
from isles.models.stages import Stage
from isles.network.routing.routes import position
from isles.pipeline.pipeline import ways_of
from isles.training.config.sections import Config
from isles.training.placement import layout_of
from isles.training.staged import planned_cut

_CROSSING = 3
"""Streams on the device while a task begins or ends: what came, what is sent, and the gradient of one of them."""
_WAITING = 2
"""Streams that a forward pass has there until its backward pass: what came, and what was sent."""


def stage_passes(config: Config, stage: int) -> tuple[int, int]:
    """(forward passes of the stage that wait for their backward pass at the most, forward passes of a step)."""
    replicas, microbatches = config.replicas_in_all, config.pipeline.microbatches
    visits = microbatches * (replicas if config.pipeline.routing == "random" else 1)
    room = ways_of(config.pipeline, planned_cut(config), replicas).room.get(position(0, stage, config.pipeline.stages))
    return min(room or visits, visits), microbatches


def stage_profile(config: Config, stage: int, state_bytes: StateBytes, name: str) -> Profile:
    """Of one microbatch, without numbers."""
    own = config.model.own is None  # a user's code may make another one next time
    sequences = config.data.batch_size_per_worker(layout_of(config).reader(0)[1]) // config.pipeline.microbatches
    piece = planned_cut(config).pieces[stage]
    found, size = (_profiled if own else _profiled.__wrapped__)(
        config.model, piece, sequences, state_bytes, f"{name}, stage {stage}"
    )
    in_flight, _ = stage_passes(config, stage)
    return replace(found, in_flight=in_flight, held=_WAITING * size, stream=found.stream + _CROSSING * size)


@lru_cache(maxsize=8)  # the methods of a plan have one model and one cut
def _profiled(
    model: ModelConfig, piece: Piece, sequences: int, state_bytes: StateBytes, name: str
) -> tuple[Profile, int]:
    """With bytes of the stream."""
    made = Stage(sketch(model), piece)
    context, _ = limits(model)
    tokens = torch.empty(sequences, context, dtype=torch.int64, device="meta")
    weights = next(made.parameters())
    stream = torch.empty(sequences, context, made.width, dtype=weights.dtype, device="meta")

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, targets = batch
        if not piece.enters and torch.is_grad_enabled():
            x = x.requires_grad_()
        if piece.leaves:
            return model(x, targets, enter=piece.enters, leave=True)
        out = model(x, enter=piece.enters)
        return (out * out).sum()  # with a gradient of the stream's size, as the one that comes

    found = profile(
        made,
        (tokens if piece.enters else stream, tokens),
        loss=loss,
        autocast="bf16" if model.autocast == "bf16" else "none",
        state_bytes=state_bytes,
        name=name,
    )
    return found, stream.nbytes
