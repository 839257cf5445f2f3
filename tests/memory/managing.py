"""A small decoder under a plan, for tests of what may go wrong around it."""

from __future__ import annotations

from typing import Any

from isles.memory.costs import Placement
from isles.memory.optimizer import Managed
from isles.models.decoder import Decoder
from isles.network.machines import MACHINES
from tests.memory.loops import DECODER, SHAPE, UNITS, adamw, plan_of, profiled

HOST = (Placement("host", "swap"),) * UNITS
OPTIMIZER = (Placement("optimizer", "keep"),) * UNITS


def managed_decoder(placements: tuple[Placement, ...] = HOST, engine: Any = None) -> tuple[Decoder, Managed]:
    """The model, and its optimizer."""
    model, made = Decoder(SHAPE), profiled(DECODER, "none")
    plan = plan_of(made, placements)
    return model, Managed(plan, model, adamw(model), profile=made, machine=MACHINES["H100"], engine=engine)


def one_step(model: Decoder, managed: Managed, number: int = 0) -> None:
    """Forward, backward, update."""
    model(DECODER.batch(number)).loss.backward()
    managed.step()
    managed.zero_grad()
