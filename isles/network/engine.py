"""The engine of simulated time: events in the order of their moments, and the links that messages take.

    send -> waits for the sender's uplink, is served -> it has left -> latency -> the last bit is there
            its first bit leaves -> latency -> waits for the target's downlink, is served -> through
    the last bit is there, and it is through -> arrived

A message arrives while it still leaves, so a single message takes the time of the slower of the two links. Messages
share a downlink fairly, each with all of its bits from the moment of its first: a share that a slow sender cannot fill
goes to the others only when that message is complete. A downlink that is faster than all possible senders together is
left out, because nobody ever waits for it. Messages of one (source, target, channel) arrive in the order of their
sends: a small jitter never overtakes a large one.

Events of one moment are ordered by kind, then by rank, then by age: service ends come first, so that a link is free for
what comes in; then arrivals, so that everything that arrives at one moment is known before the first of it is handed
out; turns of workers and deadlines come last, so that what arrives exactly at its deadline is in time.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from isles.network.links import Topology
from isles.network.noise import LognormalSeries

SERVED, ENTERS, ARRIVED, LAST = range(4)

Event = list[Any]
"""[time, kind, rank, age, action, its arguments]; ages differ, so comparing never comes to the action. None: it was
cancelled.
"""
_COMPACT_FROM = 256  # below this many cancelled events a clean-up saves nothing


class EventQueue:
    """Pending events and the present moment."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[Event] = []
        self._age = 0
        self._cancelled = 0

    def at(self, time: float, kind: int, rank: int, action: Callable[..., None], *args: Any) -> Event:
        """Have `action(*args)` called at `time` (seconds, not before now)."""
        assert time >= self.now, (time, self.now)
        self._age += 1
        event: Event = [time, kind, rank, self._age, action, args]
        heapq.heappush(self._heap, event)
        return event

    def cancel(self, event: Event) -> None:
        """Forget `event`, and at once what its action holds (a deadline would keep its transfer's result alive)."""
        if event[4] is None:
            return
        event[4] = event[5] = None
        self._cancelled += 1
        if self._cancelled > _COMPACT_FROM and 2 * self._cancelled > len(self._heap):
            self._heap[:] = [event for event in self._heap if event[4] is not None]
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
        """Move to the next event and execute it; without events nothing happens."""
        heap = self._heap
        while heap:
            event = heapq.heappop(heap)
            if (action := event[4]) is not None:
                self.now, event[4] = event[0], None
                action(*event[5])
                return
            self._cancelled -= 1

    def run(self) -> None:
        while self._heap:
            self.step()


M = TypeVar("M")


class Pipe(Generic[M]):
    """An uplink or a downlink of `rate` bits per second: fair between flows, first in first out within a flow.

    At every moment the rate is divided equally among the flows that have something to send (processor sharing); TCP
    connections over one access link come near to this. Times passed in must never decrease, nor skip a completion.
    Between two events every active flow's share is constant, so event times are exact up to rounding.
    """

    def __init__(self, rate: float) -> None:
        if not rate > 0:
            raise ValueError(f"a link's rate must be above 0 bits per second, got {rate}")
        self.rate = rate
        self._time = 0.0
        self._served_bits = 0.0
        """Bits that each active flow has been given since the link was last idle. It grows by rate / (active flows) per
        second, whatever the flows are, so a head-of-line message of b bits that starts at g is gone when it reaches
        g + b: one number per flow, fixed from start to end, kept in a heap.
        """
        self._order = 0
        self._next: float | None = math.inf  # the next completion, None where it is to be computed anew
        self._heads: list[tuple[float, int, Hashable]] = []  # (given at its end, order of start, flow)
        self._queues: dict[Hashable, deque[tuple[float, M]]] = {}  # active flows only: (bits, message), head first

    def add(self, time: float, flow: Hashable, bits: float, message: M) -> bool:
        """Queue `message` of `bits` at `time` behind those of the same `flow`. True: its service begins at once."""
        self._served_bits, self._time = self._served_by(time), time
        self._next = None
        queue = self._queues.get(flow)
        if queue is None:
            self._queues[flow] = deque([(bits, message)])
            self._start(flow, bits)
            return True
        queue.append((bits, message))
        return False

    def next_completion(self) -> float:
        """When the next message completes if nothing is added before; infinity when idle."""
        if self._next is None:
            heads = self._heads
            left = max(heads[0][0] - self._served_bits, 0.0) if heads else 0.0
            self._next = self._time + left * len(heads) / self.rate if heads else math.inf
        return self._next

    def complete(self) -> tuple[float, M, M | None]:
        """Advance to the next completion and return (its time, its message, the one of its flow that begins now); equal
        ends in order of their starts.
        """
        self._time, self._next = self.next_completion(), None
        self._served_bits, _, flow = heapq.heappop(self._heads)  # set, not added to: no rounding is carried on
        queue = self._queues[flow]
        _, message = queue.popleft()
        if queue:
            bits, following = queue[0]
            self._start(flow, bits)
            return self._time, message, following
        del self._queues[flow]
        if not self._queues:
            self._served_bits = 0.0  # a busy period leaves nothing behind: a resumed run computes the same bits
        return self._time, message, None

    def _start(self, flow: Hashable, bits: float) -> None:
        self._order += 1
        heapq.heappush(self._heads, (self._served_bits + bits, self._order, flow))

    def _served_by(self, time: float) -> float:
        assert self._time <= time <= self.next_completion(), (self._time, time, self.next_completion())
        if not self._heads or time == self._time:  # the second: an infinite rate times no time is no number
            return self._served_bits
        return self._served_bits + (time - self._time) * self.rate / len(self._heads)


class WireMessage:
    """A message between two ranks. bits: its size. latency: seconds. down: the pipe of the downlink that it uses; None:
    the downlink is never a bottleneck.
    """

    __slots__ = ("arrival", "bits", "channel", "down", "latency", "pending", "source", "target")

    def __init__(self, source: int, target: int, channel: str, bits: float) -> None:
        self.source, self.target, self.channel, self.bits = source, target, channel, bits
        self.latency = 0.0
        self.down: int | None = None
        self.pending = 1  # pipes that have not finished it
        self.arrival = 0.0  # the earliest time of arrival


S = TypeVar("S", bound=WireMessage)


class Wire(ABC, Generic[S]):
    """The links between the ranks of `topology`. Every method acts at `timeline.now`. seed: of the latencies' jitter.
    A subclass defines `arrived`, and `left` if it needs to know that a message has left.
    """

    def __init__(self, topology: Topology, seed: int, timeline: EventQueue) -> None:
        self.topology, self.seed, self.timeline = topology, seed, timeline
        self.numbers: list[Counter[int]] = [Counter() for _ in range(topology.workers)]
        """Messages sent so far, [source][target]: the jitter's counter."""
        self.latest: list[dict[tuple[int, str], float]] = [{} for _ in range(topology.workers)]
        """Latest arrival, [source][(target, channel)]."""
        self._entered: list[dict[tuple[int, str], float]] = [{} for _ in range(topology.workers)]
        """When the latest message reaches the target's downlink, likewise."""
        self._pipes: list[Pipe[S]] = [Pipe(rate) for rate in topology.rates]  # up, then those down
        self._downs: dict[int, int] = {}
        """By link, the index in `_pipes` of its downlink, if that may be a bottleneck."""
        for link in topology.far.narrow_downlinks(topology.workers):
            self._downs[link] = len(self._pipes)
            self._pipes.append(Pipe(topology.far.down_rate(link)))
        self._completions: list[Event | None] = [None] * len(self._pipes)
        self._ways: list[dict[int, tuple[int, int | None, float, LognormalSeries]]] = [{} for _ in self.numbers]

    def left(self, message: S) -> None:
        """The last bit has left its sender."""

    @abstractmethod
    def arrived(self, message: S) -> None:
        """The last bit has arrived."""

    def carry(self, message: S) -> None:
        """Queue a message on the uplink of its source."""
        source, target = message.source, message.target
        numbers = self.numbers[source]
        number = numbers.get(target, 0)
        numbers[target] = number + 1
        up, down, latency, factors = self._ways[source].get(target) or self._way(source, target)
        message.latency = latency * factors[number]
        if down is not None:
            message.down, message.pending = down, 2
        if (
            self._pipes[up].add(self.timeline.now, (source, message.channel), message.bits, message)
            and down is not None
        ):
            self._leaves(message)
        self._watch(up)

    def _way(self, source: int, target: int) -> tuple[int, int | None, float, LognormalSeries]:
        """The pipes and latency of all messages from `source` to `target`; cached."""
        link = self.topology.down(source, target)
        pipes = self.topology.up(source, target), None if link is None else self._downs.get(link)
        way = self._ways[source][target] = (*pipes, *self.topology.latencies(source, target, self.seed))
        return way

    def _watch(self, pipe: int) -> None:
        """Reschedule the event of a link's next completion; every arrival and departure may move it."""
        event, time = self._completions[pipe], self._pipes[pipe].next_completion()
        if event is not None and event[4] is not None:
            if event[0] == time:
                return
            self.timeline.cancel(event)
        self._completions[pipe] = None
        if time < math.inf:
            self._completions[pipe] = self.timeline.at(time, SERVED, pipe, self._served, pipe)

    def _leaves(self, message: S) -> None:
        """The first bit leaves: one latency later it reaches the target's downlink, behind those of its channel."""
        path, entered = (message.target, message.channel), self._entered[message.source]
        time = entered[path] = max(self.timeline.now + message.latency, entered.get(path, 0.0))
        self.timeline.at(time, ENTERS, message.source, self._enters, message)

    def _enters(self, message: S) -> None:
        assert message.down is not None
        flow = (message.source, message.target, message.channel)
        self._pipes[message.down].add(self.timeline.now, flow, message.bits, message)
        self._watch(message.down)

    def _served(self, pipe: int) -> None:
        """A link has finished its first message."""
        time, message, following = self._pipes[pipe].complete()
        assert time == self.timeline.now, (time, self.timeline.now)
        if following is not None and following.down is not None and pipe != following.down:
            self._leaves(following)
        self._watch(pipe)
        if pipe == message.down:
            self._through(message, time)
        else:
            self._through(message, time + message.latency)
            self.left(message)

    def _through(self, message: S, time: float) -> None:
        """One link has finished a message at `time`; after the last link it arrives, behind those of its channel."""
        message.pending -= 1
        if message.pending:
            message.arrival = time
            return
        path, latest = (message.target, message.channel), self.latest[message.source]
        message.arrival = latest[path] = max(time, message.arrival, latest.get(path, 0.0))
        self.timeline.at(message.arrival, ARRIVED, message.source, self.arrived, message)
