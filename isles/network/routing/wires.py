"""The network under a replay of tasks: seconds from a table, or messages over the lines of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isles.network.engine import ARRIVED, ENTERS, EventQueue, Wire, WireMessage
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

    ready: Callable[[Task], None]

    def __init__(self, seconds: Sequence[Sequence[float]]) -> None:
        self.timeline = EventQueue()
        self._seconds = seconds

    def send(self, task: Task, source: int, target: int) -> None:
        self.timeline.at(self.timeline.now + self._seconds[source][target], ARRIVED, source, self.ready, task)


class TaskMessage(WireMessage):
    """What `task` begins with."""

    __slots__ = ("task",)

    def __init__(self, task: Task, source: int, target: int, bits: float) -> None:
        super().__init__(source, target, "pipeline", bits)
        self.task = task


class MessageLines(Wire[TaskMessage]):
    """Messages over `topology`, as the virtual backend sends them.

    ranks: of each position in the pipeline's group; None: they are the same. seed: of the latencies' jitter, which a
    step's messages draw as the first between their ranks. overhead: seconds of each message before it enters its line.
    """

    ready: Callable[[Task], None]

    def __init__(
        self,
        topology: Topology,
        sizes: Sizes,
        ranks: Sequence[int] | None = None,
        seed: int = 0,
        overhead: float = 0.0,
    ) -> None:
        super().__init__(topology, seed, EventQueue())
        self._sizes, self._ranks, self._overhead = sizes, ranks, overhead

    def send(self, task: Task, source: int, target: int) -> None:
        if self._ranks is not None:
            source, target = self._ranks[source], self._ranks[target]
        message = TaskMessage(task, source, target, 8.0 * self._sizes.of(task))
        if self._overhead:
            self.timeline.at(self.timeline.now + self._overhead, ENTERS, source, self.carry, message)
        else:
            self.carry(message)

    def arrived(self, message: TaskMessage) -> None:
        """Its task could start."""
        self.ready(message.task)
