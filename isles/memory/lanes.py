"""Simulation of one worker's step: serial lanes for the device, the link up and down, the host's updates, the disk's
reads and writes, and the averages of gradients with other workers (`UnitProfile.averaged`).

    pass        forward of every unit, top (head and loss), backward of every unit from the last on, bottom (embedding)
    step        one pass per accumulated batch; then the update on the device

`isles.memory.flow` decides what happens; here each lane takes its seconds. Transfers and host updates have priorities:
those needed first go first, so the first blocks of the next forward pass precede the others ("first come" serves them
in the order of submission, as a plain queue does). With exact updates, all gradients of the step are on the host before
the first update, because clipping needs the norm of all. With early updates, each unit is updated as soon as its
gradients have arrived. If the plan counts averages with other workers, a unit's gradients have arrived when its average
has.

This is the only replay of lanes. `plan.replay` simulates exchanges between workers, not the work of one worker.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

from isles.memory.config import Update
from isles.memory.costs import Placement, Profile, ends_exchange, least_peak
from isles.memory.events import EngineLane, LaneAction, LaneEvent, Urgency
from isles.memory.flow import Half, PassTask, StepFlow, UpdateWork, nothing
from isles.network.engine import EventQueue
from isles.network.machines import Machine

LaneName = Literal["device", "up", "down", "host", "read", "write", "peers"]
LANES: tuple[LaneName, ...] = ("device", "up", "down", "host", "read", "write", "peers")


class SimulatedSpan(NamedTuple):
    """Work of a lane. start: seconds since the beginning. seconds: duration. what: its name."""

    lane: LaneName
    start: float
    seconds: float
    what: str


@dataclass(frozen=True, kw_only=True)
class LaneTimeline:
    """A simulated run. step: seconds of one step in the long run. peak: bytes. busy: seconds per step that each lane
    works. spans: of all steps, if requested.
    """

    step: float
    peak: float
    busy: dict[LaneName, float]
    spans: list[SimulatedSpan] = field(default_factory=list)


class Deadlock(RuntimeError):
    """A plan cannot complete a step within its budget."""


class SerialLane:
    """Does one piece of work at a time, the most urgent first. It is slower while its opposite lane, if any, works too.
    begins: called with the seconds and the name of each piece of work when it starts.
    """

    def __init__(self, clock: EventQueue, begins: Callable[[float, str], None], first_come: bool) -> None:
        self.clock, self.begins, self.first_come = clock, begins, first_come
        self.submitted = 0
        self.queue: list[tuple[tuple[int, ...], int, float, Callable[[], None], str]] = []
        self.opposite: SerialLane | None = None
        self.slowed = 1.0  # factor on the seconds while the opposite lane works
        self.working = False
        self.busy = 0.0

    def submit(self, urgency: tuple[int, ...], seconds: float, done: Callable[[], None], name: str) -> None:
        self.submitted += 1
        order = (self.submitted,) if self.first_come else urgency
        heapq.heappush(self.queue, (order, self.submitted, seconds, done, name))
        self._next()

    def _next(self) -> None:
        if self.working or not self.queue:
            return
        _, _, seconds, done, name = heapq.heappop(self.queue)
        if self.opposite is not None and self.opposite.working:
            seconds *= self.slowed
        self.working = True
        self.busy += seconds
        self.begins(seconds, name)

        def over() -> None:
            self.working = False
            done()
            self._next()

        self.clock.at(self.clock.now + seconds, 0, 0, over)


_ENDS = -1  # number that stands for embedding and head
_STEPS = 4  # the first step fills the lanes; the mean of the others is the step in the long run


class _Nowhere:
    """Stands for weights and activations, which a simulation does not have."""

    nbytes = 0
    fill = empty = refresh = to_host = to_device = staticmethod(nothing)


class _OneThread(nullcontext[None]):
    def notify_all(self) -> None:
        """Nothing to do: no thread waits."""


class _Task(NamedTuple):
    """A task of the device. half, task: None for the update on the device."""

    step: int
    half: Half | None
    task: PassTask | None


class LaneRun:
    """One simulation of `steps` steps of a plan. budget: bytes of the device; None: all that the machine has. Deadlock
    if the plan needs more than that even without prefetching.
    """

    def __init__(
        self,
        profile: Profile,
        placements: Sequence[Placement],
        machine: Machine,
        *,
        budget: float | None = None,
        update: Update = "exact",
        accumulation: int = 1,
        first_come: bool = False,
        steps: int = _STEPS,
        spans: bool = False,
    ) -> None:
        least = least_peak(profile, placements, accumulation)
        limit = machine.device_bytes if budget is None else budget
        if least > limit:
            raise Deadlock(f"the plan needs {least} bytes of the device, there are {limit:.0f}")
        self.count, self.in_flight = len(profile.units), profile.in_flight
        self.early, self.accumulation, self.steps, self.first_come = update == "early", accumulation, steps, first_come
        self.clock, self.changed = EventQueue(), _OneThread()
        self.lanes = {
            name: SerialLane(self.clock, partial(self._note, name), first_come and name != "up") for name in LANES[1:]
        }
        up, down = self.lanes["up"], self.lanes["down"]
        up.opposite, up.slowed = down, _slowed(machine.up, machine.up_both)
        down.opposite, down.slowed = up, _slowed(machine.down, machine.down_both)
        flow = self.flow = StepFlow(profile, placements, machine, self, self.submit, budget=limit)
        flow.device_copy = dict.fromkeys(range(self.count), _Nowhere)
        self.hosted = {index for index, cost in enumerate(flow.costs) if not cost.on_device}
        self.ends_exchange = ends_exchange(profile)
        exchanged = {index for index, times in enumerate(flow.times) if times.exchange > 0}
        self.awaited = len(self.hosted | exchanged) + (self.ends_exchange > 0)
        self.device_busy, self.working, self.at = 0.0, False, 0
        self.spans: list[SimulatedSpan] | None = [] if spans else None
        halves = list(self._program())
        self.tasks = [
            _Task(step, half, task)
            for step, half in halves
            for task in ([None] if half is None else half.tasks(self.count))
        ]
        self.ahead = iter(halves)
        self.needs: dict[tuple[int, PassTask | None], list[LaneEvent]] = {}  # by pass; for the update by step
        self.expected: set[int] = set()  # units whose update of the step is requested
        self.landed: list[int] = []  # units whose gradients of the step have arrived; _ENDS: those of the ends
        self.all_landed = self.event(not self.awaited)
        self.marks: list[float] = []

    def play(self) -> LaneTimeline:
        """Simulate until the end. Deadlock if the plan gets stuck."""
        self._go_on()
        self.clock.run()
        if self.at < len(self.tasks):
            arena = self.flow.arena
            raise Deadlock(f"stuck at {self.tasks[self.at]}: {arena.used:.0f} of {arena.budget:.0f} bytes used")
        laps = max(len(self.marks) - 1, 1)
        first = self.marks[0] if len(self.marks) > 1 else 0.0
        busy: dict[LaneName, float] = {name: self.lanes[name].busy / self.steps for name in LANES[1:]}
        return LaneTimeline(
            step=(self.marks[-1] - first) / laps,
            peak=self.flow.arena.peak,
            busy={"device": self.device_busy / self.steps, **busy},
            spans=self.spans or [],
        )

    def _note(self, lane: LaneName, seconds: float, name: str) -> None:
        if self.spans is not None and seconds:
            self.spans.append(SimulatedSpan(lane, self.clock.now, seconds, name))

    # The engine of the flow

    def event(self, happened: bool = False) -> LaneEvent:
        return LaneEvent(self, happened)

    def submit(
        self, lane: EngineLane, urgency: Urgency, seconds: float, work: LaneAction, done: LaneAction, what: str
    ) -> None:
        self.lanes[lane].submit(urgency, seconds, done, what)

    # The program

    def _program(self) -> Iterator[tuple[int, Half | None]]:
        """Yield the halves of the passes of each step, then None for its update. With several passes in flight, forward
        and backward passes alternate once that many are in flight.
        """
        waiting = min(self.in_flight, self.accumulation)
        for step in range(self.steps):
            forwards = backwards = range(step * self.accumulation, (step + 1) * self.accumulation)
            following = iter(forwards)
            yield from ((step, Half(number, "forward")) for number in itertools.islice(following, waiting))
            for number in backwards:
                yield step, Half(number, "backward")
                yield from ((step, Half(more, "forward")) for more in itertools.islice(following, 1))
            yield step, None

    def _go_on(self) -> None:
        """Start the next task if everything that it needs is there. A pass requests its bytes when it starts."""
        if self.working or self.at >= len(self.tasks):
            return
        step, half, task = self.tasks[self.at]
        key = step if half is None else half.number, task
        while key not in self.needs:
            self._ask_ahead()
        for need in self.needs[key]:
            if not need.happened:
                need.then(self._go_on)
                return
        del self.needs[key]
        if task is None and not self.early:
            for unit in self.landed if self.first_come else sorted(self.landed):
                self._update(step, unit)
        seconds = self._seconds(task)
        self.working = True
        self.device_busy += seconds
        kind = "update" if task is None else task.kind
        self._note("device", seconds, f"{kind} {task.unit}" if task and kind in ("forward", "backward") else kind)
        self.clock.at(self.clock.now + seconds, 0, 0, self._end)

    def _ask_ahead(self) -> None:
        """Request bytes for a whole pass; with several passes in flight, for this half of a pass and the next half."""
        for step, half in itertools.islice(self.ahead, 2 if self.in_flight > 1 else 1):
            self._ask(step, half)
            if half is not None and half.kind == "forward" and self.in_flight == 1:
                self._ask(*next(self.ahead))

    def _ask(self, step: int, half: Half | None) -> None:
        if half is not None:
            needs = self.flow.ask(half, partial(self._urgency, step, half))
            self.needs |= {(half.number, task): events for task, events in needs.items()}
            return
        self.flow.slots.discard()
        for unit in self.hosted - self.expected:
            self._expect(unit)
        self.needs[step, None] = [self.all_landed]

    def _expect(self, unit: int) -> None:
        self.expected.add(unit)
        self.flow.expect(unit)

    def _seconds(self, task: PassTask | None) -> float:
        if task is None:
            return self.flow.update_seconds
        if task.kind in ("forward", "backward"):
            times = self.flow.times[task.unit]
            return times.forward if task.kind == "forward" else times.backward
        return self.flow.top_seconds if task.kind == "top" else 0.0

    def _urgency(self, step: int, half: Half, task: PassTask) -> Urgency:
        back = half.kind == "backward"
        return step, half.number % self.accumulation, int(back), -task.unit if back else task.unit

    def _end(self) -> None:
        step, half, task = self.tasks[self.at]
        self.working = False
        self.at += 1
        if half is None or task is None:
            self.marks.append(self.clock.now)
            self.expected.clear()
            self.landed, self.all_landed = [], self.event(not self.awaited)
            self.flow.drop_gradients()
        else:
            self._end_task(step, half, task)
        self._go_on()

    def _end_task(self, step: int, half: Half, task: PassTask) -> None:
        flow, batch, unit = self.flow, half.number % self.accumulation, task.unit
        first, is_last = batch == 0, batch == self.accumulation - 1
        if task.kind == "forward":
            flow.forward_ends(half, unit, self._urgency(step, half, task), _Nowhere)
        elif task.kind == "top":
            flow.top_ends(first=first)
        elif task.kind == "bottom":
            if is_last and self.ends_exchange:
                self._complete(step, _ENDS, self.ends_exchange)
            flow.arena.free(flow.bottom_bytes(first=first))
        else:
            exchange = flow.times[unit].exchange
            complete = partial(self._complete, step, unit, exchange) if is_last else nothing
            if unit not in self.hosted and exchange:
                complete()
            flow.backward_ends(half, unit, (step, batch, 2, unit), first=first, send=nothing, landed=complete)

    def _complete(self, step: int, unit: int, exchange: float) -> None:
        """This worker's gradients of the unit are complete: average them with other workers, then count them."""

        def arrived() -> None:
            self.landed.append(unit)
            if self.early:
                self._update(step, unit)
            if len(self.landed) == self.awaited:
                self.all_landed.fire()

        if exchange:
            self.lanes["peers"].submit((step, unit), exchange, arrived, "mean" if unit == _ENDS else f"mean {unit}")
        else:
            arrived()

    def _update(self, step: int, unit: int) -> None:
        if unit in self.hosted:
            if unit not in self.expected:
                self._expect(unit)
            self.flow.update(unit, (step + 1, 0, 0, unit), UpdateWork, stored=self.flow.costs[unit].disk > 0)


def _slowed(alone: float, both: float) -> float:
    return 1.0 if not both or alone == both else alone / both  # equal also if both are infinite
