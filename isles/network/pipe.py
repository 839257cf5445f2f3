"""Service in one direction of one line: fair sharing between flows, first in first out within a flow.

At every moment the rate is divided equally among the flows that have something to send (processor sharing); TCP
connections over one access line come near to this. Time advances only from event to event, and between two events
every active flow's share is constant, so event times are exact up to rounding.

Bookkeeping: `_given` is the number of bits that each active flow has been given since the line was last idle. It
grows by rate / (active flows) per second, whatever the flows are, so a head-of-line message of b bits that starts at
`_given` = g is gone when `_given` reaches g + b: one number per flow, fixed from start to end, kept in a heap.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

M = TypeVar("M")


class Pipe(Generic[M]):
    """An uplink or a downlink of `rate` bits per second. Times passed in must never decrease, nor skip a completion."""

    def __init__(self, rate: float) -> None:
        if not rate > 0:
            raise ValueError(f"a line's rate must be above 0 bits per second, got {rate}")
        self.rate = rate
        self._time = 0.0
        self._given = 0.0
        self._order = 0
        self._next: float | None = math.inf  # the next completion, None where it is to be computed anew
        self._heads: list[tuple[float, int, Hashable]] = []  # (given at its end, order of start, flow)
        self._queues: dict[Hashable, deque[tuple[float, M]]] = {}  # active flows only: (bits, message), head first

    def add(self, time: float, flow: Hashable, bits: float, message: M) -> bool:
        """Hand in `message` of `bits` at `time`, behind those of the same `flow`. True: its service begins at once."""
        self._given, self._time = self._given_by(time), time
        self._next = None
        queue = self._queues.get(flow)
        if queue is None:
            self._queues[flow] = deque([(bits, message)])
            self._start(flow, bits)
            return True
        queue.append((bits, message))
        return False

    def next_completion(self) -> float:
        """When the next message will be through if nothing is added before; infinity when idle."""
        if self._next is None:
            heads = self._heads
            left = max(heads[0][0] - self._given, 0.0) if heads else 0.0
            self._next = self._time + left * len(heads) / self.rate if heads else math.inf
        return self._next

    def complete(self) -> tuple[float, M, M | None]:
        """Advance to the next completion and return (its time, its message, the one of its flow that begins now); equal
        ends in order of their starts.
        """
        self._time, self._next = self.next_completion(), None
        self._given, _, flow = heapq.heappop(self._heads)  # set, not added to: no rounding is carried on
        queue = self._queues[flow]
        _, message = queue.popleft()
        if queue:
            bits, following = queue[0]
            self._start(flow, bits)
            return self._time, message, following
        del self._queues[flow]
        if not self._queues:
            self._given = 0.0  # a busy period leaves nothing behind: a resumed run computes the same bits
        return self._time, message, None

    def _start(self, flow: Hashable, bits: float) -> None:
        self._order += 1
        heapq.heappush(self._heads, (self._given + bits, self._order, flow))

    def _given_by(self, time: float) -> float:
        assert self._time <= time <= self.next_completion(), (self._time, time, self.next_completion())
        if not self._heads or time == self._time:  # the second: an infinite rate times no time is no number
            return self._given
        return self._given + (time - self._time) * self.rate / len(self._heads)
