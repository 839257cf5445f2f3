"""The tasks of a step in time: workers that do one task at a time, and a wire between them.

One player (`StepPlay`) serves all: `orders` lists the tasks of a made-up step, `replay` times those of a real one. What
differs is the queue of a worker (which of the tasks that could start it does) and the wire (when a task's output
arrives). All that happens at one moment is settled before anything starts in it, so a result never depends on the order
in which events of one moment are looked at.

`orders` says what every worker of a pipeline does, in which order: the same lists at every worker, from the routes
alone. It is a list schedule in made-up times, forward 1, loss 1/4, backward 2, on a wire that takes no time: a free
worker does a backward or a loss if one is there, else the forward of the smallest microbatch. One legal execution makes
these lists, so workers that follow them cannot deadlock, whatever the real times are.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from isles.base.errors import unknown_name
from isles.network.engine import LAST, EventQueue
from isles.network.routing.routes import Route, Task, check_routes, position


class Queue(Protocol):
    """The tasks of one worker that could start."""

    def add(self, time: float, task: Task) -> None:
        """What `task` needs is there since `time`."""

    def take(self, room: bool) -> Task | None:
        """The task to do now, which leaves the queue; without `room` no forward. None: wait for what comes."""

    def pending(self) -> Iterable[Task]:
        """All of them."""

    def due(self) -> Task | None:
        """The task that must come first, where one must."""


class TaskWire(Protocol):
    """The network between the workers, for one step."""

    timeline: EventQueue
    ready: Callable[[Task], None]
    """Called when a task's message is there."""

    def send(self, task: Task, source: int, target: int) -> None:
        """What `task` at `target` begins with leaves `source` now."""


class Span(NamedTuple):
    """A task as it was done, in seconds from the step's start."""

    worker: int
    task: Task
    start: float
    end: float


class Ranked:
    """A queue by the order of `key(time, task)`; what is no forward goes first."""

    def __init__(self, key: Callable[[float, Task], tuple[float, ...]]) -> None:
        self._key = key
        self._forwards: list[tuple[tuple[float, ...], Task]] = []
        self._others: list[tuple[tuple[float, ...], Task]] = []

    def add(self, time: float, task: Task) -> None:
        heap = self._forwards if task.kind == "F" else self._others
        heapq.heappush(heap, (self._key(time, task), task))

    def take(self, room: bool) -> Task | None:
        if self._others:
            return heapq.heappop(self._others)[1]
        return heapq.heappop(self._forwards)[1] if self._forwards and room else None

    def pending(self) -> Iterable[Task]:
        return [task for _, task in self._forwards + self._others]

    def due(self) -> Task | None:
        return None


class FirstCome(Ranked):
    """A queue by the time since when a task could start, then by microbatch; forwards do not wait behind others."""

    def __init__(self) -> None:
        super().__init__(lambda time, task: (time, task.microbatch, task.hop))

    def take(self, room: bool) -> Task | None:
        if not self._forwards or not room:
            return super().take(room)
        heap = self._others if self._others and self._others[0] < self._forwards[0] else self._forwards
        return heapq.heappop(heap)[1]


class Listed:
    """A queue by a list made beforehand: the next of it, or nothing."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._next = 0
        self._ready: set[Task] = set()

    def add(self, time: float, task: Task) -> None:
        self._ready.add(task)

    def take(self, room: bool) -> Task | None:
        if self._next == len(self._tasks) or self._tasks[self._next] not in self._ready:
            return None
        self._next += 1
        self._ready.discard(self._tasks[self._next - 1])
        return self._tasks[self._next - 1]

    def pending(self) -> Iterable[Task]:
        return self._ready

    def due(self) -> Task | None:
        return self._tasks[self._next] if self._next < len(self._tasks) else None


class AtOnce:
    """A wire that takes no time."""

    ready: Callable[[Task], None]

    def __init__(self) -> None:
        self.timeline = EventQueue()

    def send(self, task: Task, source: int, target: int) -> None:
        self.ready(task)


def orders_of(spans: Sequence[Span]) -> dict[int, list[Task]]:
    """Every worker's tasks in the order of their starts, as `orders` gives them."""
    made: dict[int, list[Task]] = {worker: [] for worker in sorted({span.worker for span in spans})}
    for span in sorted(spans, key=lambda span: span.start):
        made[span.worker].append(span.task)
    return made


class StepPlay:
    """Every task of `routes`.

    queue:   makes the queue of the worker at a position.
    seconds: that a task takes there.
    room:    forwards that a worker may hold, by position; where there is none, any number.
    pause:   seconds that a worker rests after a task; its product leaves before.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        queue: Callable[[int], Queue],
        wire: TaskWire,
        seconds: Callable[[int, Task], float],
        room: Mapping[int, int],
        pause: Callable[[Task], float] | None = None,
    ) -> None:
        self.routes = {route.microbatch: route for route in routes}
        self.wire, self.seconds, self.room, self.pause = wire, seconds, room, pause
        self.timeline, wire.ready = wire.timeline, self._ready
        workers = sorted({worker for route in routes for worker in route.visits})
        self.queues = {worker: queue(worker) for worker in workers}
        self.held: dict[int, set[tuple[int, int]]] = {worker: set() for worker in workers}
        """(microbatch, hop) whose forward each worker keeps."""
        self.followers: dict[int, list[int]] = defaultdict(list)
        for route in routes:
            if route.after is not None:
                self.followers[route.after].append(route.microbatch)
        self.busy: set[int] = set()
        self.stirred: set[int] = set()
        """Workers that may have something to start at this moment."""
        self.spans: list[Span] = []

    def run(self) -> list[Span]:
        """In the order of their ends. ValueError, naming who waits for whom, where they cannot all be done."""
        for route in self.routes.values():
            if route.after is None:
                self._ready(Task("F", route.microbatch, 0))
        self._start()
        while (now := self.timeline.next_time()) < math.inf:
            while self.timeline.next_time() == now:
                self.timeline.step()
            self._start()
        if len(self.spans) < sum(2 * len(route.visits) + route.home for route in self.routes.values()):
            raise ValueError(self._blocked())
        return sorted(self.spans, key=lambda span: (span.end, span.start, span.worker))

    def _ready(self, task: Task) -> None:
        worker = self.routes[task.microbatch].worker(task)
        self.queues[worker].add(self.timeline.now, task)
        self.stirred.add(worker)

    def _start(self) -> None:
        """Let every free worker that has something begin."""
        now = self.timeline.now
        for worker in sorted(self.stirred - self.busy):
            held = self.held[worker]
            limit = self.room.get(worker)
            task = self.queues[worker].take(limit is None or len(held) < limit)
            if task is None:
                continue
            if task.kind == "F":
                held.add(task[1:])
            end = now + self.seconds(worker, task)
            self.busy.add(worker)
            self.spans.append(Span(worker, task, now, end))
            self.timeline.at(end, LAST, worker, self._end, worker, task)
        self.stirred.clear()

    def _end(self, worker: int, task: Task) -> None:
        """It is done; after a rest, where there is one, its worker is free."""
        route = self.routes[task.microbatch]
        if task.kind == "B":
            self.held[worker].discard(task[1:])
        following = route.following(task)
        if following is None:
            for microbatch in self.followers[task.microbatch]:
                self._ready(Task("F", microbatch, 0))
        elif (target := route.worker(following)) == worker:
            self._ready(following)
        else:
            self.wire.send(following, worker, target)
        rest = 0.0 if self.pause is None else self.pause(task)
        if rest > 0:
            self.timeline.at(self.timeline.now + rest, LAST, worker, self._free, worker)
        else:
            self._free(worker)

    def _free(self, worker: int) -> None:
        self.busy.discard(worker)
        self.stirred.add(worker)

    def _blocked(self) -> str:
        """The circle of those who wait for each other."""
        waits: dict[int, tuple[str, list[int]]] = {}  # microbatch: (where it waits, for which microbatches)
        for worker, queue in self.queues.items():
            due = queue.due()
            for task in queue.pending():
                if due is not None:
                    waits[task.microbatch] = f"its turn at worker {worker}, where {_named(due)} comes", [due.microbatch]
                else:
                    holders = sorted({microbatch for microbatch, _ in self.held[worker]})
                    numbers = " and ".join(map(str, holders))
                    waits[task.microbatch] = f"room at worker {worker}, which keeps microbatch {numbers}", holders
        for route in self.routes.values():
            if route.after is not None and route.microbatch not in waits:
                waits[route.microbatch] = f"the end of microbatch {route.after}", [route.after]
        walked: list[int] = []
        microbatch = min((m for m, (_, others) in waits.items() if others), default=None)
        while microbatch is not None and microbatch not in walked:
            walked.append(microbatch)
            microbatch = next((m for m in waits.get(microbatch, ("", []))[1] if m in waits), None)
        circle = walked[walked.index(microbatch) :] if microbatch is not None else walked
        return "the routes cannot finish: " + "; ".join(f"microbatch {m} waits for {waits[m][0]}" for m in circle)


def _named(task: Task) -> str:
    what = {"F": "the forward", "L": "the loss", "B": "the backward"}[task.kind]
    return f"{what} of microbatch {task.microbatch}"


UNITS = {"F": 1.0, "L": 0.25, "B": 2.0}
"""Powers of two, so that equal moments of the schedule are equal numbers."""
_SLACK = 2


def orders(routes: Sequence[Route], in_flight: Mapping[int, int]) -> dict[int, list[Task]]:
    """The tasks of each worker that a route visits, by its position, in the order in which it does them.

    in_flight: forwards without their backward that a worker holds at most, by position; none given: any number.

    ValueError for routes that are none, and, naming who waits for whom, for those that cannot finish with so few.
    """
    check_routes(routes)
    for worker, most in in_flight.items():
        if most < 1:
            raise ValueError(f"in_flight of worker {worker} is {most}: a worker must hold at least 1 forward")
    try:
        spans = StepPlay(
            routes,
            queue=lambda worker: Ranked(lambda time, task: (task.microbatch, task.hop)),
            wire=AtOnce(),
            seconds=lambda worker, task: UNITS[task.kind],
            room=in_flight,
        ).run()
    except ValueError as error:
        raise ValueError(f"{error}. Allow more in_flight") from None
    return orders_of(spans)


def in_flight(setting: int | str, replicas: int, stages: int) -> dict[int, int]:
    """The `in_flight` of `orders` for `replicas` columns of `stages` workers.

    setting: "1f1b", stages - stage, which is the least that keeps all busy where messages take no time; "auto", two
    more, so that they stay busy over slow links; "all", no limit (GPipe); or a number for all.
    """
    if isinstance(setting, int):
        if setting < 1:
            raise ValueError(f"in_flight = {setting}: a worker must hold at least 1 forward")
        most = [setting] * stages
    elif setting == "all":
        return {}
    elif setting in ("1f1b", "auto"):
        most = [stages - stage + (_SLACK if setting == "auto" else 0) for stage in range(stages)]
    else:
        raise ValueError(unknown_name("in_flight", setting, ("auto", "1f1b", "all")) + ", or a number")
    return {position(replica, stage, stages): most[stage] for replica in range(replicas) for stage in range(stages)}
