"""Serial lanes and events on a simulated clock, and what a simulation tells of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from isles.network.engine import EventQueue

LaneName = Literal["device", "up", "down", "host", "read", "write", "peers"]
LANES: tuple[LaneName, ...] = ("device", "up", "down", "host", "read", "write", "peers")


class SimulatedSpan(NamedTuple):
    """What a lane did: seconds since the beginning, seconds it took, and for whom."""

    lane: LaneName
    start: float
    seconds: float
    what: str


@dataclass(frozen=True, kw_only=True)
class LaneTimeline:
    """step: seconds of one, in the long run. peak: bytes. busy: seconds of a step that each lane works. spans: of all
    steps, where they were asked for.
    """

    step: float
    peak: float
    busy: dict[LaneName, float]
    spans: list[SimulatedSpan] = field(default_factory=list)


class Deadlock(RuntimeError):
    """A plan that cannot go on within its budget."""


class SimulatedEvent:
    """Something that happens once; `then` runs at that moment, or at once where it has."""

    __slots__ = ("happened", "waiting")

    def __init__(self, happened: bool = False) -> None:
        self.happened = happened
        self.waiting: list[Callable[[], None]] = []

    def then(self, run: Callable[[], None]) -> None:
        if self.happened:
            run()
        else:
            self.waiting.append(run)

    def fire(self) -> None:
        self.happened = True
        waiting, self.waiting = self.waiting, []
        for run in waiting:
            run()


class SerialLane:
    """One at a time, the most urgent first; a lane with an opposite is slower while that works too. begins: told of the
    seconds of each work and for whom, at the moment of `clock` at which it begins.
    """

    def __init__(self, clock: EventQueue, begins: Callable[[float, str], None], first_come: bool) -> None:
        self.clock, self.begins, self.first_come = clock, begins, first_come
        self.submitted = 0
        self.queue: list[tuple[tuple[int, ...], int, float, Callable[[], None], str]] = []
        self.opposite: SerialLane | None = None
        self.slowed = 1.0  # how many times as long it takes while that works
        self.working = False
        self.busy = 0.0

    def submit(self, urgency: tuple[int, ...], seconds: float, done: Callable[[], None], what: str) -> None:
        self.submitted += 1
        order = (self.submitted,) if self.first_come else urgency
        heapq.heappush(self.queue, (order, self.submitted, seconds, done, what))
        self._next()

    def _next(self) -> None:
        if self.working or not self.queue:
            return
        _, _, seconds, done, what = heapq.heappop(self.queue)
        if self.opposite is not None and self.opposite.working:
            seconds *= self.slowed
        self.working = True
        self.busy += seconds
        self.begins(seconds, what)

        def over() -> None:
            self.working = False
            done()
            self._next()

        self.clock.at(self.clock.now + seconds, 0, 0, over)
