"""Stages with boundaries of few bytes, and the same in one process; importable by fresh processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isles.comm.mesh import Mesh
from isles.models import Decoder
from isles.models.cuts import cut_points
from isles.models.subspace import Subspace, SubspaceForm, put_inside
from isles.pipeline.boundaries.names import boundary_name
from isles.pipeline.boundaries.scheme import Coordinates, Crossings, Scheme, scheme_of
from tests.pipeline.workers import SHAPE, Cell, executor, own_text


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
    run = executor(world, cell, fit=one.fit, codecs=(one.codec, one.gradient_codec))
    before = world.transport.traffic["pipeline"].bytes_sent
    losses = run.step(1, own_text(cell, world.rank, 1))
    return {
        "losses": losses,
        "gradients": {name: parameter.grad for name, parameter in run.stage.named_parameters()},
        "sent": world.transport.traffic["pipeline"].bytes_sent - before,
    }
