"""Service on one shared uplink: fair sharing between flows, first in first out within a flow.

At every moment the rate is divided equally among the flows that have something to send (processor sharing); TCP
connections over one access line come near to this. Time advances only from event to event, and between two events
every active flow's share is constant, so event times are exact up to rounding.

Bookkeeping: `_given` is the number of bits that each active flow has been given since the uplink was last idle. It
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


class Uplink(Generic[M]):
    """One uplink of `rate` bits per second. Times passed in must never decrease, nor skip a completion."""

    def __init__(self, rate: float) -> None:
        if not rate > 0:
            raise ValueError(f"an uplink's rate must be above 0 bits per second, got {rate}")
        self.rate = rate
        self._time = 0.0
        self._given = 0.0
        self._order = 0
        self._heads: list[tuple[float, int, Hashable]] = []  # (given at its end, order of start, flow)
        self._queues: dict[Hashable, deque[tuple[float, M]]] = {}  # active flows only: (bits, message), head first

    def add(self, time: float, flow: Hashable, bits: float, message: M) -> None:
        """Hand `message` of `bits` to the uplink at `time`, behind those of the same `flow`."""
        self._given, self._time = self._given_by(time), time
        queue = self._queues.get(flow)
        if queue is None:
            self._queues[flow] = deque([(bits, message)])
            self._start(flow, bits)
        else:
            queue.append((bits, message))

    def next_completion(self) -> float:
        """When the next message will be gone if nothing is added before; infinity when the uplink is idle."""
        if not self._heads:
            return math.inf
        return self._time + max(self._heads[0][0] - self._given, 0.0) * len(self._heads) / self.rate

    def complete(self) -> tuple[float, M]:
        """Advance to the next completion and return (its time, its message); equal ends in order of their starts."""
        self._time = self.next_completion()
        self._given, _, flow = heapq.heappop(self._heads)  # set, not added to: no rounding is carried on
        queue = self._queues[flow]
        _, message = queue.popleft()
        if queue:
            self._start(flow, queue[0][0])
        else:
            del self._queues[flow]
            if not self._queues:
                self._given = 0.0  # a busy period leaves nothing behind: a resumed run computes the same bits
        return self._time, message

    def remaining(self, time: float) -> dict[Hashable, float]:
        """Bits of each active flow that have not left by `time`, waiting messages included. Changes nothing."""
        given = self._given_by(time)
        left = {flow: max(end - given, 0.0) for end, _, flow in self._heads}
        for flow, queue in self._queues.items():
            left[flow] += sum(bits for bits, _ in list(queue)[1:])
        return left

    def _start(self, flow: Hashable, bits: float) -> None:
        self._order += 1
        heapq.heappush(self._heads, (self._given + bits, self._order, flow))

    def _given_by(self, time: float) -> float:
        assert self._time <= time <= self.next_completion(), (self._time, time, self.next_completion())
        if not self._heads or time == self._time:  # the second: an infinite rate times no time is no number
            return self._given
        return self._given + (time - self._time) * self.rate / len(self._heads)
