"""What the workers of these tests do; in a module of its own, so that fresh processes can import it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isles.comm.codecs import codec
from isles.comm.mesh import Mesh
from isles.models import Decoder, Shape
from isles.models.cuts import cut_points, pieces
from isles.models.stages import Stage
from isles.network.routing.events import fixed_routes, in_flight
from isles.network.routing.replay import TaskSeconds
from isles.pipeline.boundaries.base import Boundary, FullStream
from isles.pipeline.executor import Executor, Ways
from isles.pipeline.routers import StepRoutes, always, random_router
from isles.pipeline.wire import StageForm

SHAPE = Shape(d_model=16, layers=4, heads=2, ffn=32, vocab=50, context=8, tie_embeddings=False)
SEQUENCES = 2


@dataclass(frozen=True)
class Cell:
    """One layout and way of running it. limit: in_flight."""

    stages: int
    replicas: int
    microbatches: int
    routing: str = "fixed"
    home: bool = False
    order: str = "plan"
    limit: int | str = "auto"
    recompute: bool = False
    dtype: torch.dtype = torch.float32

    def router(self) -> StepRoutes:
        if self.routing == "fixed":
            return always(fixed_routes(self.replicas, self.stages, self.microbatches, home=self.home))
        return random_router(self.replicas, self.stages, self.microbatches, home=self.home, seed=5)


def window(microbatch: int, step: int) -> Tensor:
    """The text of a microbatch (B, T+1)."""
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    return torch.randint(0, SHAPE.vocab, (SEQUENCES, SHAPE.context + 1), generator=generator)


def full_stream(stage: Stage) -> Boundary:
    """What crosses."""
    return FullStream(SHAPE.d_model)


def executor(
    world: Mesh,
    cell: Cell,
    shares: TaskSeconds | None = None,
    fit: Callable[[Stage], Boundary] = full_stream,
    codecs: tuple[str, str] = ("none", "none"),
) -> Executor:
    """This worker's, over a stage of the model with seed 1 that `fit` makes ready. codecs: forward and backward."""
    group = world.world.among(range(cell.replicas * cell.stages), "pipeline")
    parts = pieces(cut_points([1] * SHAPE.layers, cell.stages), SHAPE.layers, loss_at_origin=cell.home)
    stage = Stage(Decoder(SHAPE, seed=1, dtype=cell.dtype), parts[group.rank % cell.stages])
    form = StageForm(
        sequences=SEQUENCES,
        length=SHAPE.context,
        vocab=SHAPE.vocab,
        dtype=cell.dtype,
        boundary=fit(stage),
        codec=codec(codecs[0]),
        gradient_codec=codec(codecs[1]),
    )
    ways = Ways(
        room=in_flight(cell.limit, cell.replicas, cell.stages),
        order=cell.order,  # type: ignore[arg-type]
        recompute=cell.recompute,
        shares=shares,
    )
    return Executor(stage, group, cell.router(), form, cell.microbatches, ways)


def own_text(cell: Cell, position: int, step: int) -> dict[int, Tensor]:
    """The microbatches whose origin `position` is."""
    replica, stage = divmod(position, cell.stages)
    numbers = [u * cell.replicas + replica for u in range(cell.microbatches)] if stage == 0 else []
    return {number: window(number, step) for number in numbers}


def train(world: Mesh, cells: list[Cell], steps: int = 2) -> list[list[dict[str, Any]]]:
    """For each cell and step: losses and gradients by name, bytes sent so far, most forwards held. Workers that a cell
    does not need stand by.
    """
    torch.set_num_threads(1)
    results: list[list[dict[str, Any]]] = []
    for cell in cells:
        done: list[dict[str, Any]] = []
        results.append(done)
        if world.rank >= cell.replicas * cell.stages:
            continue
        run = executor(world, cell)
        before = world.transport.traffic["pipeline"].bytes_sent
        for step in range(1, steps + 1):
            run.stage.zero_grad()
            losses = run.step(step, own_text(cell, world.rank, step))
            gradients = {name: parameter.grad for name, parameter in run.stage.named_parameters()}
            sent = world.transport.traffic["pipeline"].bytes_sent - before
            done.append({"losses": losses, "gradients": gradients, "sent": sent, "held": run.most_held})
    return results


def whole(
    cell: Cell, position: int, step: int, model: nn.Module | None = None
) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """What one process gives for what visits `position`: losses, and gradients summed in microbatch order. model: the
    whole; None: the decoder with seed 1.
    """
    model = Decoder(SHAPE, seed=1, dtype=cell.dtype) if model is None else model
    losses = {}
    for route in sorted(cell.router()(step), key=lambda route: route.microbatch):
        if position in route.visits:
            loss = model(window(route.microbatch, step)).loss
            (loss / cell.microbatches).backward()
            losses[route.microbatch] = loss.detach()
    return losses, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
