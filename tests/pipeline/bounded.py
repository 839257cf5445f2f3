"""Stages with boundaries of few bytes, and the same in one process; importable by fresh processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isles.comm.codecs import codec
from isles.comm.mesh import Mesh
from isles.models import Decoder
from isles.models.cuts import cut_points, pieces
from isles.models.stages import Stage
from isles.models.subspace import Subspace, SubspaceForm, put_inside
from isles.network.routing.orders import in_flight
from isles.pipeline.boundaries.names import boundary_name
from isles.pipeline.boundaries.scheme import Crossings, Scheme, scheme_of
from isles.pipeline.boundaries.subspace import Coordinates
from isles.pipeline.executor import Executor, Ways
from isles.pipeline.wire import StageForm
from tests.pipeline.workers import SEQUENCES, SHAPE, Cell, own_text, window


@dataclass(frozen=True)
class Bounded:
    """A cell with a boundary. whole_width: a subspace that is all of the stream, along its axes, without a table."""

    cell: Cell
    boundary: str
    form: SubspaceForm = "coordinates"
    codec: str = "none"
    gradient_codec: str = "none"
    whole_width: bool = False

    @property
    def cuts(self) -> list[int]:
        return cut_points([1] * SHAPE.layers, self.cell.stages)

    def scheme(self) -> Scheme:
        place = Crossings(cuts=tuple(self.cuts), home=self.cell.home, width=SHAPE.d_model, vocab=SHAPE.vocab)
        return scheme_of(boundary_name(self.boundary), place, form=self.form, seed=1)

    def model(self) -> nn.Module:
        """The whole, fitted."""
        model = Decoder(SHAPE, seed=1, dtype=self.cell.dtype)
        self.fit(model)
        return model

    def fit(self, model: Any) -> Any:
        """What crosses."""
        if self.whole_width:
            model.subspace = Subspace(torch.eye(SHAPE.d_model, dtype=self.cell.dtype), None)
            put_inside(model, model.subspace, range(self.cuts[-1]), "coordinates")
            return Coordinates(model.subspace)
        scheme = self.scheme()
        scheme.fit(model)
        return scheme.boundary(model)


def train(world: Mesh, bounded: list[Bounded]) -> list[dict[str, Any] | None]:
    """Of each: losses, gradients by name, bytes sent, in one step. Workers that one does not need stand by."""
    torch.set_num_threads(1)
    return [_step(world, one) for one in bounded]


def _step(world: Mesh, one: Bounded) -> dict[str, Any] | None:
    cell = one.cell
    if world.rank >= cell.replicas * cell.stages:
        return None
    group = world.world.among(range(cell.replicas * cell.stages), "pipeline")
    parts = pieces(one.cuts, SHAPE.layers, loss_at_origin=cell.home)
    stage = Stage(Decoder(SHAPE, seed=1, dtype=cell.dtype), parts[group.rank % cell.stages])
    form = StageForm(
        sequences=SEQUENCES,
        length=SHAPE.context,
        vocab=SHAPE.vocab,
        dtype=cell.dtype,
        boundary=one.fit(stage),
        codec=codec(one.codec),
        gradient_codec=codec(one.gradient_codec),
    )
    ways = Ways(room=in_flight(cell.limit, cell.replicas, cell.stages), recompute=cell.recompute)
    executor = Executor(stage, group, cell.router(), form, cell.microbatches, ways)
    before = world.transport.traffic["pipeline"].bytes_sent
    losses = executor.step(1, own_text(cell, world.rank, 1))
    return {
        "losses": losses,
        "gradients": {name: parameter.grad for name, parameter in stage.named_parameters()},
        "sent": world.transport.traffic["pipeline"].bytes_sent - before,
    }


def whole(one: Bounded, model: nn.Module, position: int = 0) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Losses and gradients of what visits `position`, of `model` in one process."""
    losses = {}
    for route in sorted(one.cell.router().routes(1), key=lambda route: route.microbatch):
        if position in route.visits:
            loss = model(window(route.microbatch, 1)).loss
            (loss / one.cell.microbatches).backward()
            losses[route.microbatch] = loss.detach()
    return losses, {name: own.grad for name, own in model.named_parameters() if own.grad is not None}
