"""Serial lanes and events on a simulated clock, and what a simulation tells of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

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


class Clock(Protocol):
    """What a lane needs of the simulation."""

    def number(self) -> int:
        """A new one, larger than all before."""
        ...

    def after(self, seconds: float, run: Callable[[], None]) -> None:
        """Run it then."""
        ...

    def note(self, lane: LaneName, seconds: float, what: str) -> None:
        """A lane begins work now."""
        ...


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
    """One at a time, the most urgent first; a lane with an opposite is slower while that works too."""

    def __init__(self, run: Clock, name: LaneName, first_come: bool, slowed: float = 1.0) -> None:
        self.run, self.name, self.first_come, self.slowed = run, name, first_come, slowed
        self.queue: list[tuple[tuple[int, ...], int, float, Callable[[], None], str]] = []
        self.opposite: SerialLane | None = None
        self.working = False
        self.busy = 0.0

    def submit(self, urgency: tuple[int, ...], seconds: float, done: Callable[[], None], what: str) -> None:
        number = self.run.number()
        heapq.heappush(self.queue, ((number,) if self.first_come else urgency, number, seconds, done, what))
        self._next()

    def _next(self) -> None:
        if self.working or not self.queue:
            return
        _, _, seconds, done, what = heapq.heappop(self.queue)
        if self.opposite is not None and self.opposite.working:
            seconds *= self.slowed
        self.working = True
        self.busy += seconds
        self.run.note(self.name, seconds, what)

        def over() -> None:
            self.working = False
            done()
            self._next()

        self.run.after(seconds, over)
