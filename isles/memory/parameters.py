"""The device's copy of a unit's parameters: parameters of its own, whose storages are filled, emptied and filled again.

The unit's modules show the host's parameters, as anyone who reads the model expects, and the device's while the unit
runs. Views that autograd has saved stay valid when a storage is emptied and filled again, for it is the same storage.
Who else writes to the host's parameters (an outer step that lands, a checkpoint that is loaded) is noticed by their
version counters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from isles.memory.engines.base import Moves
from isles.memory.meter import MemoryMeter
from isles.memory.units import ModelUnit, travels_as


class Brought:
    """One unit's copy on `device`. stays: it is never emptied, only refreshed. fetch: brings the host's weights where
    they are in a file; None: they are copied from the host's parameters.
    """

    def __init__(
        self,
        unit: ModelUnit,
        device: torch.device,
        autocast: str,
        *,
        stays: bool,
        fetch: Callable[[Sequence[Tensor]], None] | None = None,
        meter: MemoryMeter | None = None,
        moves: Moves | None = None,
    ) -> None:
        self.slots, self.stays, self.meter = unit.slots, stays, meter
        self._moves = Moves() if moves is None else moves
        self.host, self._fetch = unit.parameters, fetch
        self.device = [
            nn.Parameter(
                torch.empty_like(slot.parameter, dtype=travels_as(slot, autocast), device=device),
                slot.parameter.requires_grad,
            )
            for slot in unit.slots
        ]
        self._sizes = [parameter.untyped_storage().nbytes() for parameter in self.device]
        self._seen: list[int] = []
        if stays:
            self._track()
            self.refresh()
        else:
            self.empty()

    @property
    def nbytes(self) -> int:
        """Of the copy, where it is."""
        return sum(self._sizes)

    def show(self, on_device: bool) -> None:
        """Let the unit's modules use the device's parameters, or the host's."""
        for slot, brought in zip(self.slots, self.device, strict=True):
            slot.module._parameters[slot.name] = brought if on_device else slot.parameter

    def fill(self) -> None:
        """Make room and copy the host's weights."""
        with self._moves.room():
            for parameter, size in zip(self.device, self._sizes, strict=True):
                parameter.untyped_storage().resize_(size)
        self._track()
        self.refresh()

    def empty(self) -> None:
        if self.meter is not None:
            self.meter.forget(*self.device)
        for parameter in self.device:
            parameter.untyped_storage().resize_(0)

    def refresh(self) -> None:
        """Copy the host's weights."""
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(self.device)):
            if self._fetch is not None:
                self._fetch(self.device)
            else:
                self._moves.fill(self.device, self.host)
        self._seen = [own._version for own in self.host]

    @property
    def stale(self) -> bool:
        """Whether someone has written to the host's weights since they were copied."""
        return self._seen != [own._version for own in self.host]

    def take_gradients(self) -> list[Tensor | None]:
        """The gradients of the device's parameters, which have none any more."""
        taken = [parameter.grad for parameter in self.device]
        for parameter in self.device:
            parameter.grad = None
        return taken

    def _track(self) -> None:
        if self.meter is not None:
            self.meter.track(*self.device)
