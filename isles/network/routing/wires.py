"""The network under a replay of tasks: seconds from a table, or messages over the lines of a run.

`MessageLines` does with the messages of a pipeline what the virtual backend does with them, event by event: those of a
sender leave one after the other, uplinks and narrow downlinks are shared fairly, a latency lies between.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from isles.network.pipe import Pipe
from isles.network.routing.routes import Route, Task
from isles.network.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of the messages of a step. forward: on to the next visit. home: from the last visit to the origin, which
    computes the loss. backward: a gradient, from the origin to the last visit too.
    """

    forward: int
    home: int
    backward: int

    def of(self, task: Task) -> int:
        """Bytes of the message that `task` begins with."""
        return {"F": self.forward, "L": self.home, "B": self.backward}[task.kind]


def bytes_sent(routes: Sequence[Route], sizes: Sizes) -> Counter[int]:
    """Bytes that each worker sends in a step; what it keeps for itself is not sent."""
    sent: Counter[int] = Counter()
    for route in routes:
        here = route.origin
        for task in route.tasks():
            there = route.worker(task)
            if there != here:
                sent[here] += sizes.of(task)
            here = there
    return sent


class Delays:
    """A message from worker u to worker v takes `seconds[u][v]`, whatever else is on the way."""

    def __init__(self, seconds: Sequence[Sequence[float]]) -> None:
        self.when = math.inf
        self._seconds = seconds
        self._coming: list[tuple[float, Task]] = []

    def send(self, now: float, task: Task, source: int, target: int) -> None:
        heapq.heappush(self._coming, (now + self._seconds[source][target], task))
        self.when = self._coming[0][0]

    def arrivals(self) -> Iterable[Task]:
        task = heapq.heappop(self._coming)[1]
        self.when = self._coming[0][0] if self._coming else math.inf
        return (task,)


_SERVED, _ENTERS, _ARRIVED = range(3)  # what comes first at one moment


class _SentMessage:
    __slots__ = ("arrival", "bits", "down", "latency", "left", "source", "target", "task")

    def __init__(self, task: Task, source: int, target: int, bits: float, latency: float, down: int | None) -> None:
        self.task, self.source, self.target = task, source, target
        self.bits, self.latency, self.down = bits, latency, down
        self.left = 1 if down is None else 2  # lines that are not done with it
        self.arrival = 0.0  # not before


class MessageLines:
    """Messages over `topology`, as the virtual backend sends them.

    ranks: of each position in the pipeline's group; None: they are the same. seed: of the latencies' jitter, which a
    step's messages draw as the first between their ranks.
    """

    def __init__(self, topology: Topology, sizes: Sizes, ranks: Sequence[int] | None = None, seed: int = 0) -> None:
        self.when = math.inf
        self._topology, self._sizes, self._ranks, self._seed = topology, sizes, ranks, seed
        self._numbers: Counter[tuple[int, int]] = Counter()
        self._pipes: list[Pipe[_SentMessage]] = [Pipe(rate) for rate in topology.rates]  # up, then those down
        self._downs: dict[int, int] = {}  # narrow downlinks: the place in `_pipes`, by line
        for line in topology.far.narrow_downlinks(topology.workers):
            self._downs[line] = len(self._pipes)
            self._pipes.append(Pipe(topology.far.down_rate(line)))
        self._due = [math.inf] * len(self._pipes)
        """When each line's next completion is expected; events that say otherwise are of the past."""
        self._entered: dict[tuple[int, int], float] = {}
        self._latest: dict[tuple[int, int], float] = {}
        self._events: list[tuple[float, int, int, int, _SentMessage | int]] = []  # (when, what, sender, age, of what)
        self._age = 0

    def send(self, now: float, task: Task, source: int, target: int) -> None:
        if self._ranks is not None:
            source, target = self._ranks[source], self._ranks[target]
        number = self._numbers[source, target]
        self._numbers[source, target] += 1
        latency = self._topology.latency(source, target, number=number, seed=self._seed)
        line = self._topology.down(source, target)
        down = None if line is None else self._downs.get(line)
        message = _SentMessage(task, source, target, 8.0 * self._sizes.of(task), latency, down)
        index = self._topology.up(source, target)
        if self._pipes[index].add(now, source, message.bits, message) and down is not None:
            self._leaves(now, message)
        self._watch(index)
        self._settle()

    def arrivals(self) -> Iterable[Task]:
        now, what, _, _, item = heapq.heappop(self._events)
        arrived: tuple[Task, ...] = ()
        if isinstance(item, int):
            self._due[item] = math.inf
            self._served(now, item)
        elif what == _ENTERS:
            assert item.down is not None
            self._pipes[item.down].add(now, (item.source, item.target), item.bits, item)
            self._watch(item.down)
        else:
            arrived = (item.task,)
        self._settle()
        return arrived

    def _served(self, now: float, index: int) -> None:
        """A line's first message is through: it has left, or has come in."""
        _, message, following = self._pipes[index].complete()
        if following is not None and following.down is not None and index != following.down:
            self._leaves(now, following)
        self._watch(index)
        message.left -= 1
        way = message.source, message.target
        message.arrival = max(message.arrival, now if index == message.down else now + message.latency)
        if not message.left:
            message.arrival = self._latest[way] = max(message.arrival, self._latest.get(way, 0.0))
            self._at(message.arrival, _ARRIVED, message.source, message)

    def _leaves(self, now: float, message: _SentMessage) -> None:
        """Its first bit leaves: a latency later it is at the downlink, behind those before it."""
        way = message.source, message.target
        self._entered[way] = max(now + message.latency, self._entered.get(way, 0.0))
        self._at(self._entered[way], _ENTERS, message.source, message)

    def _watch(self, index: int) -> None:
        time = self._pipes[index].next_completion()
        if time != self._due[index]:
            self._due[index] = time
            if time < math.inf:
                self._at(time, _SERVED, index, index)

    def _at(self, time: float, what: int, sender: int, item: _SentMessage | int) -> None:
        self._age += 1
        heapq.heappush(self._events, (time, what, sender, self._age, item))

    def _settle(self) -> None:
        """Forget completions that will not be at their time any more."""
        events = self._events
        while events and isinstance(events[0][4], int) and self._due[events[0][4]] != events[0][0]:
            heapq.heappop(events)
        self.when = events[0][0] if events else math.inf
