"""Gradients on their way from the device to the parameters of the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isles.memory.engines.base import LaneEvent
from isles.wrapping import host_work


class Landed(NamedTuple):
    """Gradients of a unit that are on the host, for the parameters that have one. last: of the step's last batch.
    shown: called when they have become those of the parameters.
    """

    unit: int
    last: bool
    parameters: list[nn.Parameter]
    gradients: list[Tensor]
    shown: Callable[[], None] | None


class Arrivals:
    """What comes down, until the computing thread takes it. arrived: called with a unit whose gradients of the step's
    last batch are on its parameters.
    """

    def __init__(self, arrived: Callable[[int], None]) -> None:
        self.arrived = arrived
        self._landed: deque[Landed] = deque()
        self._on_the_way: list[LaneEvent] = []

    def expect(self, landing: LaneEvent) -> None:
        """Note that gradients were sent; `landing` happens once `add` was called with them."""
        self._on_the_way.append(landing)

    def add(self, landed: Landed) -> None:
        """Take in gradients that are on the host now."""
        self._landed.append(landed)

    def deliver(self) -> None:
        """Make what has come the gradient of its parameters, on this thread, so that their hooks run here."""
        while self._landed:
            unit, last, parameters, gradients, shown = self._landed.popleft()
            with host_work(), torch.enable_grad():
                torch.autograd.backward(parameters, gradients)
                del gradients
                if shown is not None:
                    shown()
            if last:
                self.arrived(unit)

    def all(self) -> None:
        """Wait for what is on its way, and deliver it."""
        for event in self._on_the_way:
            event.wait("a gradient on the host")
        self._on_the_way.clear()
        self.deliver()
