"""How long a step of a pipeline takes: its routes, the order of its tasks, their seconds and a wire (seconds from a
table, or messages over the links of a run), event by event.

In a fixed pipeline of S equal stages and M microbatches, loss at the last, forwards of F and backwards of B seconds and
messages that take no time, a step takes (M + S - 1) (F + B), of which (S - 1) / (M + S - 1) is a bubble. Nothing is
rounded but the sums of times, so a run on the virtual clock without jitter takes what its replay takes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from isles.network.engine import ARRIVED, ENTERS, EventQueue, Wire, WireMessage
from isles.network.links import Links, Topology
from isles.network.routing.events import (
    FirstCome,
    Listed,
    Queue,
    Route,
    Span,
    StepPlay,
    Task,
    TaskWire,
    check_routes,
    fixed_routes,
    in_flight,
    orders,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of the messages of a step. forward: on to the next visit. home: from the last visit to the origin, which
    computes the loss. backward: a gradient, from the origin to the last visit too.
    """

    forward: int
    home: int
    backward: int

    def of(self, task: Task) -> int:
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
    """The input of `task`."""

    __slots__ = ("task",)

    def __init__(self, task: Task, source: int, target: int, bits: float) -> None:
        super().__init__(source, target, "pipeline", bits)
        self.task = task


class LinkWire(Wire[TaskMessage]):
    """Messages over `topology`, as the virtual backend sends them.

    ranks: of each position in the pipeline's group; None: they are the same. seed: of the latencies' jitter, which a
    step's messages draw as the first between their ranks. overhead: seconds of each message before it enters its link.
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
        self.ready(message.task)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSeconds:
    """Seconds of computing for one microbatch, by position.

    loss: of head and loss with their gradient; where it is computed at the last visit, it is a part of that forward.
    """

    forward: Sequence[float]
    loss: Sequence[float]
    backward: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A simulated step. spans: every task, in the order of the ends."""

    spans: Sequence[Span]

    @property
    def makespan(self) -> float:
        return self.spans[-1].end if self.spans else 0.0

    @property
    def busy(self) -> dict[int, float]:
        busy: defaultdict[int, float] = defaultdict(float)
        for span in self.spans:
            busy[span.worker] += span.end - span.start
        return dict(busy)

    @property
    def bubbles(self) -> dict[int, float]:
        """The share of the step in which each worker was idle."""
        return {worker: 1 - seconds / self.makespan for worker, seconds in self.busy.items()}


def replay(
    routes: Sequence[Route],
    seconds: TaskSeconds,
    wire: TaskWire,
    queue: Callable[[int], Queue],
    *,
    room: Mapping[int, int] | None = None,
    pause: Callable[[Task], float] | None = None,
) -> Replay:
    """Play one step. queue: `in_order(...)` or `first_come`. room and pause: as in `StepPlay`.

    ValueError for invalid routes, and for tasks that wait for each other, naming them.
    """
    check_routes(routes)
    by_number = {route.microbatch: route for route in routes}

    def duration(worker: int, task: Task) -> float:
        return seconds_of(seconds, by_number[task.microbatch], worker, task)

    return Replay(spans=StepPlay(routes, queue, wire, duration, room or {}, pause).run())


def fixed_step(microbatches: int, seconds: TaskSeconds, holds: str, links: Links, sizes: Sizes) -> Replay:
    """A step of one fixed pipeline over `links`, the loss at its last stage. holds: forwards, as of `in_flight`."""
    stages = len(seconds.forward)
    routes = fixed_routes(1, stages, microbatches, home=False)
    queue = in_order(orders(routes, in_flight(holds, 1, stages)))
    return replay(routes, seconds, LinkWire(Topology(stages, links), sizes), queue)


def seconds_of(seconds: TaskSeconds, route: Route, worker: int, task: Task) -> float:
    """Seconds of a task of `route` at the position `worker`."""
    if task.kind == "F":
        ends = task.hop == route.last and not route.home
        return seconds.forward[worker] + (seconds.loss[worker] if ends else 0.0)
    return seconds.loss[worker] if task.kind == "L" else seconds.backward[worker]


def in_order(orders: Mapping[int, Sequence[Task]]) -> Callable[[int], Queue]:
    """Every worker follows its list (`orders`)."""
    return lambda worker: Listed(orders.get(worker, ()))


def first_come(worker: int) -> Queue:
    """A free worker does the task that came first, whatever its kind."""
    return FirstCome()
