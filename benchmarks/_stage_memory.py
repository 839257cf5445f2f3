"""Bytes that a stage of a pipeline holds at most, counted by every storage that its operations make: weights,
gradients, AdamW's moments, versions, what backward passes need, and messages.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import isles
from isles.comm.mesh import Mesh
from isles.memory.meter import MemoryMeter
from isles.models import Decoder, Shape
from isles.pipeline.config import PipelineConfig
from isles.pipeline.pipeline import Pipeline, form_of
from isles.pipeline.ravnest.stage import AsyncStage

_STEPS = 4


def peaks(shape: Shape, batch: int, config: PipelineConfig) -> list[int]:
    """By stage, of one replica or cluster cut as `config` says. batch: sequences of its step."""
    free = isles.Links(bandwidth=float("inf"))
    return isles.run_virtual(_peak, config.stages, links=free, args=(shape, batch, config))


def _peak(_: Mesh, shape: Shape, batch: int, config: PipelineConfig) -> int:
    torch.set_num_threads(1)
    world, is_async = isles.mesh(stage=config.stages), config.routing == "ravnest"
    kept = replace(config, routing="fixed") if is_async else config
    pipeline = Pipeline(
        Decoder(shape, seed=0), world, batch_size=batch, context=shape.context, vocab=shape.vocab, config=kept
    )
    stage, rows = pipeline.stage, batch // config.microbatches
    texts = [text(shape, number, batch) for number in range(_STEPS)]
    adamw = torch.optim.AdamW(stage.parameters(), lr=1e-3)

    def update(stale: int = 0) -> None:
        adamw.step()
        adamw.zero_grad()

    meter = MemoryMeter()
    meter.track(*stage.parameters())
    if is_async:
        form = form_of(stage, pipeline.scheme, kept, batch_size=batch, context=shape.context, vocab=shape.vocab)
        node = AsyncStage(stage, update, world.stage, form, replace(config, in_flight=config.stages))
        with meter:
            node.run((part for whole in texts for part in whole.split(rows)) if pipeline.reads else ())
        return meter.peak
    with meter:
        for whole in texts:
            pipeline.step(whole if pipeline.reads else None)
            update()
    return meter.peak


def text(shape: Shape, number: int, rows: int) -> Tensor:
    """Some."""
    return torch.randint(0, shape.vocab, (rows, shape.context + 1), generator=torch.Generator().manual_seed(number))
