"""A step of a pipeline is a set of routes, one for each microbatch: which workers it visits, in which order.

A route with n visits is these tasks, each at the end of the one before it:

    F 0 -> F 1 -> ... -> F n-1 -> B n-1 -> ... -> B 0               loss at the last visit (part of F n-1)
    F 0 -> F 1 -> ... -> F n-1 -> L -> B n-1 -> ... -> B 0          home: the origin, visits[0], computes the loss

F: forward, B: backward, L: the loss and its gradient. The worker of F k keeps what B k needs until that is done. Fixed
pipelines, random ones (NoLoCo, arXiv 2506.10911 section 3.1) and plans are functions that return routes.

Their tasks in time: workers that do one task at a time, and a wire between them. One player (`StepPlay`) serves all:
`orders` lists the tasks of a made-up step, `replay` times those of a real one. What differs is the queue of a worker
(which of the tasks that could start it does) and the wire (when a task's output arrives). All that happens at one
moment is settled before anything starts in it, so a result never depends on the order in which events of one moment are
looked at.

`orders` says what every worker of a pipeline does, in which order: the same lists at every worker, from the routes
alone. It is a list schedule in made-up times, forward 1, loss 1/4, backward 2, on a wire that takes no time: a free
worker does a backward or a loss if one is there, else the forward of the smallest microbatch. One legal execution makes
these lists, so workers that follow them cannot deadlock, whatever the real times are.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from isles.base.errors import unknown_name
from isles.network.engine import LAST, EventQueue
from isles.network.noise import hash64

MOST_VISITS = 16
"""Of a route: four bits of a message's address count its hops."""

Kind = Literal["F", "L", "B"]


class Task(NamedTuple):
    """What a worker does in one go. hop: the index in the route's visits, of L that of the last visit."""

    kind: Kind
    microbatch: int
    hop: int


@dataclass(frozen=True, slots=True)
class Route:
    """The way of one microbatch.

    microbatch: its number in the step, 0 or more.
    visits:     positions of workers in the pipeline's group, in the order of execution; the first is the origin, which
                has the tokens.
    home:       the loss is computed at the origin; else at the last visit.
    after:      the microbatch, with the same origin and a smaller number, whose backward must have ended before this
                one starts; None: it starts at once.
    """

    microbatch: int
    visits: tuple[int, ...]
    home: bool
    after: int | None = None

    @property
    def origin(self) -> int:
        return self.visits[0]

    @property
    def last(self) -> int:
        return len(self.visits) - 1

    def worker(self, task: Task) -> int:
        return self.visits[0] if task.kind == "L" else self.visits[task.hop]

    def following(self, task: Task) -> Task | None:
        """The task that begins with what `task` made; None after the last one."""
        kind, microbatch, hop = task
        if kind == "L" or (kind == "F" and hop == self.last and not self.home):
            return Task("B", microbatch, self.last)
        if kind == "B":
            return Task("B", microbatch, hop - 1) if hop else None
        return Task("F", microbatch, hop + 1) if hop < self.last else Task("L", microbatch, hop)

    def tasks(self) -> Iterator[Task]:
        task: Task | None = Task("F", self.microbatch, 0)
        while task is not None:
            yield task
            task = self.following(task)


def check_routes(routes: Sequence[Route], workers: int | None = None) -> None:
    """ValueError, one line that names the microbatch, for routes that cannot be those of one step; workers: how many
    positions there are, where that is known.
    """
    origins: dict[int, int] = {}
    for route in routes:
        name = f"the route of microbatch {route.microbatch}"
        if route.microbatch < 0:
            raise ValueError(f"{name}: microbatches are numbered from 0")
        if route.microbatch in origins:
            raise ValueError(f"{name} is there twice: a microbatch has one route")
        if not 1 <= len(route.visits) <= MOST_VISITS:
            raise ValueError(f"{name} visits {len(route.visits)} workers: choose 1 to {MOST_VISITS}")
        for position in route.visits:
            if position < 0 or (workers is not None and position >= workers):
                known = "from 0" if workers is None else f"0 to {workers - 1}"
                raise ValueError(f"{name} visits worker {position}: workers are numbered {known}")
        origins[route.microbatch] = route.origin
    for route in routes:
        name = f"the route of microbatch {route.microbatch}"
        if route.after is None:
            continue
        if route.after not in origins:
            raise ValueError(f"{name} comes after microbatch {route.after}, which has no route in this step")
        if route.after >= route.microbatch:
            raise ValueError(f"{name} comes after microbatch {route.after}: it must come after a smaller number")
        if origins[route.after] != route.origin:
            raise ValueError(
                f"{name} starts at worker {route.origin} after microbatch {route.after}, which ends at worker "
                f"{origins[route.after]}: both must have one origin"
            )


def position(replica: int, stage: int, stages: int) -> int:
    """Where stage `stage` of a replica stands in the pipeline's group: replica after replica."""
    return replica * stages + stage


def fixed_routes(replicas: int, stages: int, microbatches: int, *, home: bool) -> list[Route]:
    """Every replica's microbatches go through its own stages.

    Args:
        replicas, stages: of the pipeline.
        microbatches: of each replica; number u of replica a is u * replicas + a.
        home: the loss is computed at the origin.
    """
    return [
        Route(u * replicas + a, tuple(position(a, stage, stages) for stage in range(stages)), home)
        for u in range(microbatches)
        for a in range(replicas)
    ]


def random_routes(replicas: int, stages: int, microbatches: int, *, home: bool, seed: int, step: int) -> list[Route]:
    """At every boundary s of every u, stage s of replica a sends to stage s + 1 of replica `permutation(...)[a]`, so
    each worker gets each u exactly once. The same at every worker that calls it.

    Args:
        replicas, stages, microbatches, home: as in `fixed_routes`.
        seed: of the permutations.
        step: counted from 1.
    """
    routes = []
    for u in range(microbatches):
        ways = [[a] for a in range(replicas)]  # the replica of each visit
        for boundary in range(stages - 1):
            to = permutation(replicas, seed=seed, step=step, microbatch=u, boundary=boundary)
            for way in ways:
                way.append(to[way[-1]])
        for a, way in enumerate(ways):
            visits = tuple(position(replica, stage, stages) for stage, replica in enumerate(way))
            routes.append(Route(u * replicas + a, visits, home))
    return routes


def permutation(size: int, *, seed: int, step: int, microbatch: int, boundary: int) -> list[int]:
    """A permutation of `size` replicas, a pure function of its arguments: ranks in order of hashes."""
    return sorted(range(size), key=lambda replica: (hash64(seed, step, microbatch, boundary, replica), replica))


def visited(routes: Sequence[Route]) -> Counter[int]:
    """How many forwards each worker does."""
    return Counter(worker for route in routes for worker in route.visits)


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
    """A simulation of one step, of all tasks of `routes`.

    queue:   makes the queue of the worker at a position.
    seconds: of a task at a position.
    room:    by position, forwards that a worker may hold; a missing position: any number.
    pause:   seconds of rest after a task; its result is sent before.
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
