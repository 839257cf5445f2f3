"""The bytes of the device, granted strictly in the order in which they are asked for.

What is asked for first never waits for what comes later: fetching ahead cannot block what runs before it, and a plan
that fits without fetching ahead cannot deadlock.

`Slots` hold the weights of units that live elsewhere: they are fetched for a use, the forward or the backward pass of
a unit, and dropped after it, unless the next use has been granted by then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from isles.memory.costs import UnitCost
from isles.memory.engines.base import Engine, EngineLane, LaneEvent, Urgency
from isles.memory.meter import MovedBytes
from isles.memory.parameters import Brought
from isles.memory.passes import Half


class Arena:
    """`budget` bytes, of which `used` are taken; peak: the most that ever were. Safe among threads."""

    def __init__(self, budget: float, used: float = 0) -> None:
        self.budget, self.used, self.peak = budget, used, used
        self._requested: deque[tuple[float, Callable[[], None]]] = deque()
        self._granted: deque[Callable[[], None]] = deque()
        self._notifying = False
        self._lock = threading.Lock()

    def want(self, nbytes: float, then: Callable[[], None]) -> None:
        """Call `then` once the bytes are granted: at once, or from a thread that frees what it waits for. These calls
        come one after the other, in the order of the grants, whichever threads ask and free: a callback may rely on
        those of earlier grants having run.
        """
        with self._lock:
            self._requested.append((nbytes, then))
        self._grant()

    def free(self, nbytes: float) -> None:
        if nbytes:
            with self._lock:
                self.used -= nbytes
            self._grant()

    def _grant(self) -> None:
        # Callbacks run outside the lock, for they may ask and free themselves; one thread runs them, in their order.
        with self._lock:
            while self._requested and self.used + self._requested[0][0] <= self.budget:
                nbytes, then = self._requested.popleft()
                self.used += nbytes
                self.peak = max(self.peak, self.used)
                self._granted.append(then)
            if self._notifying:  # a thread, perhaps this one, runs callbacks until none is left
                return
            self._notifying = True
        while (then := self._next()) is not None:
            try:
                then()
            except BaseException:
                with self._lock:
                    self._notifying = False
                raise

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            self._notifying = bool(self._granted)
            return self._granted.popleft() if self._granted else None


class SlotUse(NamedTuple):
    """One use of a unit's weights on the device: the unit's part of a forward or backward pass."""

    half: Half
    unit: int


Submit = Callable[[EngineLane, Urgency, float, Callable[[], None], Callable[[], None]], None]
"""Puts work on a lane: `Runner.submit`."""


class Slots:
    """The slots of all units in `brought` whose cost has one.

    arena: grants the bytes. costs, seconds, updated: by unit, its cost, the seconds to fill its slot, and the event of
    its latest update on the host. counted: is told of bytes that move, and of those that need not.
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
        """Ask for room, and then for the weights; the event of their being there."""
        there = self._engine.event()
        before, self._last[use.unit] = self._last.get(use.unit), use
        self._arena.want(self._costs[use.unit].slot, partial(self._granted, use, before, urgency, there))
        return there

    def used(self, use: SlotUse) -> None:
        """`use` has ended: its room is empty, or stays for the next use."""
        with self._engine.changed:  # emptied before the next use can be granted, and so before it is filled again
            stays = self._uses.pop(use)
            if stays is None:
                self._brought[use.unit].empty()
        if stays is not None:
            stays.fire()

    def discard(self) -> None:
        """Weights have changed: no later use may keep those of an earlier one."""
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
