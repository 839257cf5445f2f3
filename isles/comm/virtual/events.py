"""The event queue of a virtual run: what happens on the network, in order of virtual time.

Events of one moment are ordered by kind, then by rank, then by age: service ends come first, so that a line is free for
what comes in; then arrivals, so that everything that arrives at one moment is known before the first of it is handed
out; a deadline comes last, so that what arrives exactly at its deadline is in time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

SERVED, ENTERS, ARRIVED, DEADLINE = range(4)

Event = list[Any]
"""[time, kind, rank, age, action]; ages differ, so comparing never comes to the action. None: it was cancelled."""

_COMPACT_FROM = 256  # below this many cancelled events a clean-up saves nothing


class EventQueue:
    """Pending events and the moment that is being acted out."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[Event] = []
        self._age = 0
        self._cancelled = 0

    def at(self, time: float, kind: int, rank: int, action: Callable[[], None]) -> Event:
        """Have `action` called at `time` (seconds, not before now)."""
        assert time >= self.now, (time, self.now)
        self._age += 1
        event: Event = [time, kind, rank, self._age, action]
        heapq.heappush(self._heap, event)
        return event

    def cancel(self, event: Event) -> None:
        """Forget `event`, and at once what its action holds (a deadline would keep its transfer's result alive)."""
        if event[4] is None:
            return
        event[4] = None
        self._cancelled += 1
        if self._cancelled > _COMPACT_FROM and 2 * self._cancelled > len(self._heap):
            self._heap = [event for event in self._heap if event[4] is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def next_time(self) -> float:
        """When the next event happens; infinity when there is none."""
        heap = self._heap
        while heap and heap[0][4] is None:
            heapq.heappop(heap)
            self._cancelled -= 1
        return heap[0][0] if heap else math.inf

    def step(self) -> None:
        """Move to the next event and act it out."""
        event = heapq.heappop(self._heap)
        while event[4] is None:
            self._cancelled -= 1
            event = heapq.heappop(self._heap)
        action, event[4] = event[4], None
        self.now = event[0]
        action()
