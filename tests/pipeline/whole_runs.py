"""Whole runs of replica methods, in stages and unsplit; a module of its own, so that fresh processes can import it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import isles
from isles.comm.mesh import Mesh
from isles.models import Decoder, Shape
from isles.models.cuts import cut_points, pieces
from isles.models.stages import Stage
from isles.network.routing.events import fixed_routes, in_flight
from isles.pipeline.boundaries.base import FullStream
from isles.pipeline.evaluation import assembled, mean_loss
from isles.pipeline.executor import Executor, Ways
from isles.pipeline.routers import always
from isles.pipeline.wire import StageForm
from isles.replicas.replica import Plain

MICROBATCHES, SEQUENCES, CONTEXT = 2, 2, 8
WIDTH, VOCAB = 64, 64


def shape(tied: bool) -> Shape:
    """Blocks and embedding fill whole blocks of a codec, so that a stage's scales are the whole model's."""
    return Shape(d_model=WIDTH, layers=4, heads=2, ffn=66, vocab=VOCAB, context=CONTEXT, tie_embeddings=tied)


def batch(replica: int, step: int) -> Tensor:
    """A replica's batch of a step (B, T+1)."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randint(0, VOCAB, (MICROBATCHES * SEQUENCES, CONTEXT + 1), generator=generator)


def train(world: Mesh, method: str, options: dict[str, Any], stages: int, steps: int, tied: bool, norm: float | None):
    """(weights by name after each step, losses that this worker saw, weights by name of the one model, outer bytes,
    mean validation loss, weights by name of the whole model where it was put together).
    """
    torch.set_num_threads(1)
    mesh = isles.mesh(stage=stages)
    replicas = mesh.outer.size
    replica, stage_number = mesh.layout.coordinates[world.rank][:2]
    whole = Decoder(shape(tied), seed=1)
    part = pieces(cut_points([1] * 4, stages), 4, loss_at_origin=tied)[stage_number]
    stage = Stage(whole, part)
    adamw = torch.optim.AdamW(stage.parameters(), lr=3e-3)
    inner = Plain(stage, adamw, peers=mesh.stage, charged=True)
    optimizer = getattr(isles, method)(stage, inner, mesh.outer, max_norm=norm, **options)
    form = StageForm(sequences=SEQUENCES, length=CONTEXT, vocab=VOCAB, dtype=torch.float32, boundary=FullStream(WIDTH))
    executor = Executor(
        stage,
        mesh.pipeline,
        always(fixed_routes(replicas, stages, MICROBATCHES, home=tied)),
        form,
        MICROBATCHES,
        Ways(room=in_flight("auto", replicas, stages)),
        quiet=optimizer.no_sync,
    )
    history, losses = [], []
    for step in range(1, steps + 1):
        rows = batch(replica, step).split(SEQUENCES)
        text = {u * replicas + replica: rows[u] for u in range(MICROBATCHES)} if stage_number == 0 else {}
        seen = executor.step(step, text)
        losses.append(float(torch.stack([seen[number] for number in sorted(seen)]).mean()))
        optimizer.step()
        optimizer.zero_grad()
        history.append({name: parameter.detach().clone() for name, parameter in stage.named_parameters()})
    sent = world.transport.traffic["outer"].bytes_sent
    optimizer.consolidate()
    texts = [batch(99, step)[: 4 - step] for step in range(3)]  # of 4, 3 and 2 rows
    judged = [mean_loss(executor.compute, mesh.stage, texts if stage_number == 0 else [], home=tied) for _ in range(2)]
    assert judged[0] == judged[1]
    parts = pieces(cut_points([1] * 4, stages), 4, loss_at_origin=tied)
    one = assembled(stage, mesh.stage, Decoder(shape(tied), seed=2), parts)
    final = {name: parameter.detach().clone() for name, parameter in stage.named_parameters()}
    state = None if one is None else {name: tensor.clone() for name, tensor in one.state_dict().items()}
    return history, losses, final, sent, judged[0], state
