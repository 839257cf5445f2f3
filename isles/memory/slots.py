"""Weights that come to the device for a use, the forward or the backward pass of a unit, and go after it; those that
are needed again before they are gone stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from isles.memory.arena import Arena
from isles.memory.costs import UnitCost
from isles.memory.engines.base import Engine, EngineLane, LaneEvent, Urgency
from isles.memory.meter import MovedBytes
from isles.memory.parameters import Brought
from isles.memory.passes import Half


class SlotUse(NamedTuple):
    """Of a unit's weights on the device."""

    half: Half
    unit: int


class Submit(Protocol):
    """See `Runner.submit`."""

    def __call__(
        self, lane: EngineLane, urgency: Urgency, seconds: float, work: Callable[[], None], done: Callable[[], None]
    ) -> None: ...


class Slots:
    """Of the units in `brought` whose cost has a slot. seconds: to fill each unit's. updated: of every unit, the event
    of its latest update on the host. counted: bytes that move, and that need not.
    """

    def __init__(
        self,
        engine: Engine,
        arena: Arena,
        brought: Mapping[int, Brought],
        costs: Sequence[UnitCost],
        seconds: Sequence[float],
        updated: Sequence[LaneEvent],
        counted: MovedBytes,
        submit: Submit,
    ) -> None:
        self._engine, self._arena, self._brought, self._costs = engine, arena, brought, costs
        self._seconds, self._updated, self._counted, self._submit = seconds, updated, counted, submit
        self._uses: dict[SlotUse, LaneEvent | None] = {}  # that were granted; an event: it stays for a next use
        self._last: dict[int, SlotUse] = {}  # use of each unit's weights as they are

    def ask(self, use: SlotUse, urgency: Urgency) -> LaneEvent:
        """For the bytes, and then the weights: the event of their being there."""
        there = self._engine.event()
        before, self._last[use.unit] = self._last.get(use.unit), use
        self._arena.want(self._costs[use.unit].slot, partial(self._granted, use, before, urgency, there))
        return there

    def used(self, use: SlotUse) -> None:
        """It has ended."""
        with self._engine.changed:  # emptied before the next use can be granted, and so before it is filled again
            stays = self._uses.pop(use)
            if stays is None:
                self._brought[use.unit].empty()
        if stays is not None:
            stays.fire()

    def discard(self) -> None:
        """Weights change: no use is of those before."""
        self._last.clear()

    def _granted(self, use: SlotUse, before: SlotUse | None, urgency: Urgency, there: LaneEvent) -> None:
        brought, cost = self._brought[use.unit], self._costs[use.unit]
        with self._engine.changed:
            self._uses[use] = None
            if before in self._uses:  # the use before, of the same weights, has not ended: they stay
                self._uses[before] = there
                self._counted.stay("read" if cost.filed else "up", cost.fetched)
                return

        def fetch() -> None:
            if not cost.filed:
                self._counted.add("up", cost.fetched)
            lane: EngineLane = "read" if cost.filed else "up"
            self._submit(lane, urgency, self._seconds[use.unit], brought.fill, there.fire)

        self._updated[use.unit].then(fetch)
