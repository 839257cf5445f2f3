"""A step of one worker, played through: serial lanes for the device, the link up and down, the host's updates, the
disk's reads and writes, and the mean of gradients with other workers (`UnitProfile.averaged`).

    pass        forward of every unit, top (head and loss), backward of every unit from the last on, bottom (embedding)
    step        as many passes as batches are accumulated; then the update on the device

Every pass asks for all its bytes when it starts, in the order in which it needs them, and the arena grants them in that
order. Transfers and host updates are served by priority: what is needed first goes first, so the first blocks of the
next forward pass come before the rest ("first come" serves them in the order in which they arise, as a plain queue
does). With exact updates, all gradients of the step are on the host before the first update, for clipping needs the
norm of all; with early ones, each unit is updated as soon as its gradients are there. Where a plan counts the mean with
other workers, "there" is when that of the unit has come.

This is the only replay of lanes; `plan.replay` plays exchanges between workers, not what one worker does.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

from isles.memory.arena import Arena
from isles.memory.config import Update
from isles.memory.costs import (
    SLOTS,
    Placement,
    Profile,
    ends_exchange,
    ends_seconds,
    ends_update,
    least_peak,
    staging,
    unit_costs,
    unit_time,
)
from isles.memory.passes import Half, TaskKind
from isles.network.engine import EventQueue
from isles.network.machines import Machine

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

    __slots__ = ("callbacks", "happened")

    def __init__(self, happened: bool = False) -> None:
        self.happened = happened
        self.callbacks: list[Callable[[], None]] = []

    def then(self, run: Callable[[], None]) -> None:
        if self.happened:
            run()
        else:
            self.callbacks.append(run)

    def fire(self) -> None:
        self.happened = True
        callbacks, self.callbacks = self.callbacks, []
        for run in callbacks:
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


_ENDS = -1  # in place of a unit: embedding and head
_STEPS = 4  # the first one fills the lanes; the mean of the others is the step in the long run


class _Task(NamedTuple):
    step: int
    batch: int
    kind: TaskKind | Literal["update"]
    unit: int


class LaneRun:
    """One simulation, of `steps` steps of a plan. budget: bytes of the device, None for the machine's. Deadlock where
    the plan needs more than that even without fetching ahead.
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
        units = list(zip(profile.units, placements, strict=True))
        self.costs = unit_costs(profile, placements)
        self.times = [unit_time(unit, one, machine) for unit, one in units]
        self.ends, self.count = profile.ends, len(units)
        self.top_seconds = ends_seconds(profile, machine)
        self.update_seconds = sum(times.update for times in self.times) + ends_update(profile, machine)
        self.update, self.accumulation, self.steps = update, accumulation, steps
        self.first_come, self.in_flight = first_come, profile.in_flight
        resident = sum(cost.resident for cost in self.costs)
        self.arena = Arena(limit, profile.base + staging(profile, placements) + resident)
        self.updates = Arena(SLOTS)  # that are between memory and the disk
        self.clock = EventQueue()
        self.lanes = {
            name: SerialLane(self.clock, partial(self._note, name), first_come and name != "up") for name in LANES[1:]
        }
        up, down = self.lanes["up"], self.lanes["down"]
        up.opposite, up.slowed = down, _slowed(machine.up, machine.up_both)
        down.opposite, down.slowed = up, _slowed(machine.down, machine.down_both)
        self.device_busy, self.working = 0.0, False
        self.spans: list[SimulatedSpan] | None = [] if spans else None
        self.tasks = list(self._program())
        self.at, self.asked = 0, 0
        self.needs: dict[int, list[SimulatedEvent]] = {}
        self.events: dict[tuple[object, ...], SimulatedEvent] = {}
        self.last: dict[tuple[int, int], tuple[int, ...]] = {}  # use of a slot, by step and unit, that was asked for
        self.over: set[tuple[int, ...]] = set()  # uses of a slot that have ended
        self.retained: dict[tuple[int, ...], SimulatedEvent] = {}  # uses whose slot stays for the next one
        self.landed: dict[int, list[int]] = {}  # units whose gradients of a step are there; _ENDS: of the rest
        self.ends_exchange = ends_exchange(profile)
        pairs = zip(self.costs, self.times, strict=True)
        self.awaited = sum(not cost.on_device or times.exchange > 0 for cost, times in pairs) + (self.ends_exchange > 0)
        self.marks: list[float] = []

    def play(self) -> LaneTimeline:
        """Deadlock where it gets stuck."""
        self._go_on()
        self.clock.run()
        if self.at < len(self.tasks):
            raise Deadlock(
                f"stuck at {self.tasks[self.at]}: {self.arena.used:.0f} of {self.arena.budget:.0f} bytes used"
            )
        laps = max(len(self.marks) - 1, 1)
        first = self.marks[0] if len(self.marks) > 1 else 0.0
        busy: dict[LaneName, float] = {name: self.lanes[name].busy / self.steps for name in LANES[1:]}
        return LaneTimeline(
            step=(self.marks[-1] - first) / laps,
            peak=self.arena.peak,
            busy={"device": self.device_busy / self.steps, **busy},
            spans=self.spans or [],
        )

    def _note(self, lane: LaneName, seconds: float, what: str) -> None:
        if self.spans is not None and seconds:
            self.spans.append(SimulatedSpan(lane, self.clock.now, seconds, what))

    # The program

    def _program(self) -> Iterator[_Task]:
        """With several passes in flight, backward and forward passes take turns once there are as many."""
        waiting = min(self.in_flight, self.accumulation)
        for step in range(self.steps):
            forwards, backwards = iter(range(self.accumulation)), range(self.accumulation)
            halves = [Half(batch, "forward") for batch in itertools.islice(forwards, waiting)]
            for batch in backwards:
                halves.append(Half(batch, "backward"))
                halves += [Half(following, "forward") for following in itertools.islice(forwards, 1)]
            for half in halves:
                yield from (_Task(step, half.number, *task) for task in half.tasks(self.count))
            yield _Task(step, 0, "update", 0)

    def _go_on(self) -> None:
        """Start the task that is next, if what it needs is there; a pass asks for its bytes when it starts."""
        if self.working or self.at >= len(self.tasks):
            return
        while self.asked <= self.at:
            self._ask_ahead()
        for need in self.needs[self.at]:
            if not need.happened:
                need.then(self._go_on)
                return
        task = self.tasks[self.at]
        del self.needs[self.at]
        if task.kind == "update" and self.update == "exact":
            landed = self.landed.pop(task.step, [])
            for unit in landed if self.first_come else sorted(landed):
                if unit != _ENDS and not self.costs[unit].on_device:
                    self._update(task.step, unit)
        seconds = self._seconds(task)
        self.working = True
        self.device_busy += seconds
        self._note("device", seconds, f"{task.kind} {task.unit}" if task.kind in ("forward", "backward") else task.kind)
        self.clock.at(self.clock.now + seconds, 0, 0, self._end)

    def _ask_ahead(self) -> None:
        """For a pass; with several in flight, for this half of one and the next half."""
        ends = ("bottom", "update") if self.in_flight == 1 else ("top", "bottom", "update")
        for _ in range(1 if self.in_flight == 1 else 2):
            while self.asked < len(self.tasks):
                task = self.tasks[self.asked]
                self.needs[self.asked] = self._needs(task)
                self.asked += 1
                if task.kind in ends:
                    break

    def _seconds(self, task: _Task) -> float:
        if task.kind == "forward":
            return self.times[task.unit].forward
        if task.kind == "backward":
            return self.times[task.unit].backward
        return {"top": self.top_seconds, "bottom": 0.0, "update": self.update_seconds}[task.kind]

    def _needs(self, task: _Task) -> list[SimulatedEvent]:
        step, batch, kind, unit = task
        if kind == "update":
            return [self._event("landed", step, happened=not self.awaited)]
        if kind == "top":
            return [self._granted(self.ends.top + self.ends.top_gradients + self.ends.carried)]
        if kind == "bottom":
            return [self._granted(self.ends.bottom + self.ends.bottom_gradients)]
        cost, times, needs = self.costs[unit], self.times[unit], []
        urgency = self._urgency(task)
        if cost.slot:
            there = SimulatedEvent()
            needs.append(there)

            use = (step, batch, int(kind == "backward"), unit)
            before_it, self.last[step, unit] = self.last.get((step, unit)), use

            def slot_granted(before: tuple[int, ...] | None = before_it) -> None:
                if before is not None and before not in self.over:
                    self.retained[before] = there  # still there from the use before: it stays
                    return
                lane = self.lanes["read" if cost.filed else "up"]
                fetch = lambda: lane.submit(urgency, times.slot, there.fire, f"weights {unit}")  # noqa: E731
                self._event("valid", step, unit, happened=step == 0).then(fetch)

            self.arena.want(cost.slot, slot_granted)
        elif cost.refreshed and kind == "forward" and batch == 0:
            needs.append(self._event("fresh", step, unit, happened=step == 0))
        if kind == "forward":
            needs.append(self._granted(cost.forward))
            return needs
        if cost.swap:
            back = SimulatedEvent()
            needs.append(back)

            def swap_granted() -> None:
                fetch = lambda: self.lanes["up"].submit(urgency, times.swap_up, back.fire, f"activations {unit}")  # noqa: E731
                self._event("out", step, batch, unit).then(fetch)

            self.arena.want(cost.swap, swap_granted)
        needs.append(self._granted(cost.backward + cost.gradients))
        return needs

    def _granted(self, nbytes: float) -> SimulatedEvent:
        event = SimulatedEvent()
        self.arena.want(nbytes, event.fire)
        return event

    def _urgency(self, task: _Task) -> tuple[int, ...]:
        return task.step, task.batch, int(task.kind == "backward"), -task.unit if task.kind == "backward" else task.unit

    def _event(self, *key: object, happened: bool = False) -> SimulatedEvent:
        if key not in self.events:
            self.events[key] = SimulatedEvent(happened)
        return self.events[key]

    def _end(self) -> None:
        task = self.tasks[self.at]
        self.working = False
        self.at += 1
        freed = getattr(self, f"_end_{task.kind}")(task)
        self.arena.free(freed)
        self._go_on()

    def _end_forward(self, task: _Task) -> float:
        step, batch, _, unit = task
        cost = self.costs[unit]
        if cost.slot:
            self._slot_used((step, batch, 0, unit))
        if cost.swap:

            def out() -> None:
                self.arena.free(cost.swap)
                self._event("out", step, batch, unit).fire()

            self.lanes["down"].submit(self._urgency(task), self.times[unit].swap_down, out, f"activations {unit}")
        return cost.forward_end + cost.slot

    def _end_top(self, task: _Task) -> float:
        retained = 0 if task.batch else self.ends.top_gradients
        return self.ends.top + self.ends.top_gradients - retained + sum(cost.casts_end for cost in self.costs)

    def _end_backward(self, task: _Task) -> float:
        step, batch, _, unit = task
        cost = self.costs[unit]
        if cost.slot:
            self._slot_used((step, batch, 1, unit))
        last = batch == self.accumulation - 1
        if cost.on_device:
            if last and self.times[unit].exchange:
                self._complete(step, unit, self.times[unit].exchange)
            return cost.backward_end + (cost.gradients if batch else 0)

        def landed() -> None:
            self.arena.free(cost.gradients)
            if last:
                self._complete(step, unit, self.times[unit].exchange)

        urgency = (step, batch, 2, unit)
        lane = self.lanes["write" if cost.filed else "down"]
        lane.submit(urgency, self.times[unit].gradients, landed, f"gradients {unit}")
        return cost.backward_end + cost.slot

    def _complete(self, step: int, unit: int, exchange: float) -> None:
        """This worker's gradients of the step are complete: what is averaged with others' goes to them first."""

        def there() -> None:
            self.landed.setdefault(step, []).append(unit)
            if self.update == "early" and unit != _ENDS and not self.costs[unit].on_device:
                self._update(step, unit)
            if len(self.landed[step]) == self.awaited:
                self._event("landed", step).fire()

        if exchange:
            self.lanes["peers"].submit((step, unit), exchange, there, "mean" if unit == _ENDS else f"mean {unit}")
        else:
            there()

    def _end_bottom(self, task: _Task) -> float:
        if self.ends_exchange and task.batch == self.accumulation - 1:
            self._complete(task.step, _ENDS, self.ends_exchange)
        return self.ends.bottom + self.ends.carried + (self.ends.bottom_gradients if task.batch else 0)

    def _end_update(self, task: _Task) -> float:
        self.marks.append(self.clock.now)
        held = sum(cost.gradients for cost in self.costs if cost.on_device)
        return held + self.ends.top_gradients + self.ends.bottom_gradients

    def _slot_used(self, use: tuple[int, ...]) -> None:
        self.over.add(use)
        if use in self.retained:
            self.retained.pop(use).fire()

    def _update(self, step: int, unit: int) -> None:
        """On the host, with its states from and to the disk; then the device's copy follows."""
        cost, times = self.costs[unit], self.times[unit]
        urgency = (step + 1, 0, 0, unit)

        def updated() -> None:
            if not cost.filed:
                self._event("valid", step + 1, unit).fire()
            if cost.refreshed:
                fresh = self._event("fresh", step + 1, unit)
                self.lanes["up"].submit(urgency, times.refresh, fresh.fire, f"weights {unit}")
            if cost.disk:
                self.lanes["write"].submit(urgency, times.write, written, f"states {unit}")

        def written() -> None:
            self.updates.free(1)
            self._event("stored", step + 1, unit).fire()
            if cost.filed:
                self._event("valid", step + 1, unit).fire()

        def update() -> None:
            self.lanes["host"].submit(urgency, times.host, updated, f"update {unit}")

        def read() -> None:
            self.lanes["read"].submit(urgency, times.read, update, f"states {unit}")

        if cost.disk:
            ask = partial(self.updates.want, 1, read)
            self._event("stored", step, unit, happened=step == 0).then(ask)
        else:
            update()


def _slowed(alone: float, both: float) -> float:
    return 1.0 if not both or alone == both else alone / both  # of lanes without a limit too
