"""The bytes, weights and lanes of a step under a plan, shared by the execution (`runner`) and the simulation (`lanes`).

    start of a pass       requests all its bytes, in the order of need
    forward of a unit     frees its transients; swapped activations go to the host
    backward of a unit    frees what its forward pass saved; its gradients go to where it is updated
    update on the host    with its states from and to the disk; then the device's copy is refreshed

As both use it, a plan cannot promise what a run does not do. The device's bytes are granted strictly in the order of
the requests: an earlier request never waits for a later one, so prefetching cannot block what runs before it, and a
plan that fits without prefetching cannot deadlock. Loads no torch.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from isles.memory.costs import (
    SLOTS,
    Placement,
    Profile,
    UnitCost,
    ends_seconds,
    ends_update,
    staging,
    unit_costs,
    unit_time,
)
from isles.memory.events import EngineEvents, EngineLane, LaneAction, LaneEvent, Submit, Urgency
from isles.network.machines import Machine

TaskKind = Literal["forward", "top", "backward", "bottom"]
PassKind = Literal["forward", "backward"]


class PassTask(NamedTuple):
    """The forward or backward pass of a unit, or the part after the last unit (top) or before the first (bottom)."""

    kind: TaskKind
    unit: int


class Half(NamedTuple):
    """A forward or a backward pass through all units. number: of the whole pass."""

    number: int
    kind: PassKind

    def tasks(self, units: int) -> list[PassTask]:
        if self.kind == "forward":
            return [*(PassTask("forward", index) for index in range(units)), PassTask("top", 0)]
        return [*(PassTask("backward", index) for index in reversed(range(units))), PassTask("bottom", 0)]


class PassesInFlight:
    """The passes through `units` units that are in flight, at most `in_flight` at a time.

    The bytes of a half are requested when it begins: with one pass in flight, those of the whole pass with its first
    half; with several, also those of the next half, if the order of the step was announced. So bytes are requested in
    the order of their use.
    """

    def __init__(self, units: int, in_flight: int) -> None:
        self.units, self.in_flight = units, in_flight
        self.left: dict[int, deque[PassTask]] = {}
        """What is left of each pass, by number."""
        self.begun = 0
        """Passes so far."""
        self._requested: set[Half] = set()
        self._ahead: deque[Half] = deque()

    def announce(self, halves: Iterable[tuple[PassKind, object]]) -> None:
        """Set the order of the halves of a step: their kinds, and a key of each pass."""
        if self.in_flight == 1:
            return
        self._ahead.clear()
        numbers = dict[object, int]()
        for kind, key in halves:
            if kind == "forward":
                numbers[key] = self.begun + len(numbers) + 1
            self._ahead.append(Half(numbers[key], kind))

    def begin(self) -> int:
        """Begin a forward pass; returns its number."""
        self.begun += 1
        self.left[self.begun] = deque(Half(self.begun, "forward").tasks(self.units))
        self.left[self.begun].extend(Half(self.begun, "backward").tasks(self.units))
        return self.begun

    def to_ask(self, half: Half) -> list[Half]:
        """The halves to request when `half` begins, in order."""
        if self.in_flight == 1:
            return [half, Half(half.number, "backward")] if half.kind == "forward" else []
        if self._ahead and half not in self._ahead and half not in self._requested:
            self._ahead.clear()  # not the announced order: the next halves are unknown
        asked = [] if half in self._requested else [half]
        while half in self._ahead:
            self._ahead.popleft()
        if self._ahead and (not self._requested or self._requested == {half}):
            asked.append(self._ahead.popleft())
        self._requested = (self._requested | set(asked)) - {half}
        return asked

    def task(self, number: int, task: PassTask) -> bool:
        """Begin `task` of a pass. False if another one is next."""
        left = self.left.get(number)
        if not left or left[0] != task:
            return False
        left.popleft()
        if not left:
            del self.left[number]
        return True

    def open(self, *, whole: bool) -> PassTask | None:
        """The next task of an unfinished pass; whole: of any pass, not only of those whose backward has begun. None:
        all are done.
        """
        for left in self.left.values():
            waits = self.in_flight > 1 and left[0] == PassTask("backward", self.units - 1)
            if whole or not waits:
                return left[0]
        return None


def not_followed(task: PassTask, unit: str) -> RuntimeError:
    """The error for a pass that ends before `task` of `unit` has run."""
    return RuntimeError(
        f"memory: a forward pass was not followed by its backward pass ({task.kind} of {unit} is next): run backward() "
        "after each forward pass, or use torch.no_grad() for one that needs none"
    )


def out_of_order(task: PassTask, unit: str) -> RuntimeError:
    """The error for `task` of `unit` when another one is next."""
    if task.kind == "forward":
        return RuntimeError(
            f"memory: {unit} ran out of its order: blocks must run one after the other, once in each pass, and each "
            "forward pass needs its backward pass before the next"
        )
    return RuntimeError(
        f"memory: the backward pass of {unit} ran twice or out of its order: call backward() once for each forward "
        "pass, and run blocks in the order of the model"
    )


class Arena:
    """A budget of bytes. used: granted now; peak: the most that were. Thread-safe."""

    def __init__(self, budget: float, used: float = 0) -> None:
        self.budget, self.used, self.peak = budget, used, used
        self._requested: deque[tuple[float, Callable[[], None]]] = deque()
        self._granted: deque[Callable[[], None]] = deque()
        self._notifying = False
        self._lock = threading.Lock()

    def want(self, nbytes: float, then: Callable[[], None]) -> None:
        """Request `nbytes`, and call `then` once they are granted: at once, or from a thread that frees bytes. The
        calls run one after the other, in the order of the grants, whichever threads request and free: a callback may
        rely on those of earlier grants having run.
        """
        with self._lock:
            self._requested.append((nbytes, then))
        self._grant()

    def free(self, nbytes: float) -> None:
        if nbytes:
            with self._lock:
                self.used -= nbytes
            self._grant()

    def _grant(self) -> None:
        # Callbacks run outside the lock, as they may request and free bytes themselves; one thread runs them in order.
        with self._lock:
            while self._requested and self.used + self._requested[0][0] <= self.budget:
                nbytes, then = self._requested.popleft()
                self.used += nbytes
                self.peak = max(self.peak, self.used)
                self._granted.append(then)
            if self._notifying:  # a thread, perhaps this one, runs callbacks until none is left
                return
            self._notifying = True
        while (then := self._next()) is not None:
            try:
                then()
            except BaseException:
                with self._lock:
                    self._notifying = False
                raise

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            self._notifying = bool(self._granted)
            return self._granted.popleft() if self._granted else None


class MovedBytes:
    """Thread-safe counts. moved: bytes by lane. stayed: bytes that did not go over a lane, as a slot was granted for
    its next use before the last one had ended; the sum of both is what the plan says.
    """

    def __init__(self) -> None:
        self._moved, self._stayed = Counter[str](), Counter[str]()
        self._lock = threading.Lock()

    def add(self, lane: str, nbytes: int) -> None:
        """Count bytes that go over the lane."""
        with self._lock:
            self._moved[lane] += nbytes

    def stay(self, lane: str, nbytes: int) -> None:
        """Count bytes that need not go over the lane, as they are there already."""
        with self._lock:
            self._stayed[lane] += nbytes

    @property
    def moved(self) -> dict[str, int]:
        return {lane: self._moved[lane] for lane in ("up", "down")}

    @property
    def stayed(self) -> dict[str, int]:
        return {lane: self._stayed[lane] for lane in ("up", "read")}


class SlotUse(NamedTuple):
    """One use of a unit's weights on the device: the unit's part of a forward or backward pass."""

    half: Half
    unit: int


class Slots:
    """Memory on the device for the weights of units that are elsewhere: they are fetched for a use, and dropped after
    it, unless the next use has been granted by then.
    """

    def __init__(self, flow: StepFlow) -> None:
        self._flow, self._engine = flow, flow.engine
        self._uses: dict[SlotUse, LaneEvent | None] = {}  # granted uses; an event: the weights stay for the next use
        self._last: dict[int, SlotUse] = {}  # the last requested use of each unit's current weights

    def ask(self, use: SlotUse, urgency: Urgency) -> LaneEvent:
        """Request memory and then the weights; returns the event of their arrival."""
        there, updated = self._engine.event(), self._flow.updated[use.unit]
        before, self._last[use.unit] = self._last.get(use.unit), use
        granted = partial(self._granted, use, before, urgency, there, updated)
        self._flow.arena.want(self._flow.costs[use.unit].slot, granted)
        return there

    def used(self, use: SlotUse) -> None:
        """`use` has ended: empty its slot, or leave it for the next use."""
        with self._engine.changed:  # empty the slot before the next use can be granted and fill it
            stays = self._uses.pop(use)
            if stays is None:
                self._flow.device_copy[use.unit].empty()
        if stays is not None:
            stays.fire()

    def discard(self) -> None:
        """The weights have changed: later uses must fetch them again."""
        self._last.clear()

    def _granted(
        self, use: SlotUse, before: SlotUse | None, urgency: Urgency, there: LaneEvent, updated: LaneEvent
    ) -> None:
        flow, cost = self._flow, self._flow.costs[use.unit]
        lane: EngineLane = "read" if cost.filed else "up"
        with self._engine.changed:
            self._uses[use] = None
            if before in self._uses:  # the previous use of the same weights has not ended: they stay
                self._uses[before] = there
                flow.counted.stay(lane, cost.fetched)
                return

        def fetch() -> None:
            if not cost.filed:
                flow.counted.add("up", cost.fetched)
            fill = flow.device_copy[use.unit].fill
            flow.submit(lane, urgency, flow.times[use.unit].slot, fill, there.fire, f"weights {use.unit}")

        updated.then(fetch)


def nothing() -> None:
    """No work: for simulations."""


class UpdateWork(NamedTuple):
    """One update of a unit: load its tensors from disk, update, save them."""

    step: LaneAction = nothing
    load: LaneAction = nothing
    save: LaneAction = nothing


class StepFlow:
    """The steps of one model. budget: bytes of the device for the passes. submit: puts work on a lane of `engine`.

    device_copy: by unit on the host, its copy on the device: `fill`, `empty`, `refresh`. updated, refreshed, written:
    by unit, the events of its last update on the host, of the refresh of its device copy, and of its states on disk.
    update_seconds: of the updates on the device.
    """

    def __init__(
        self,
        profile: Profile,
        placements: Sequence[Placement],
        machine: Machine,
        engine: EngineEvents,
        submit: Submit,
        *,
        budget: float,
    ) -> None:
        self.engine, self.submit, self.ends = engine, submit, profile.ends
        self.costs: list[UnitCost] = unit_costs(profile, placements)
        self.times = [unit_time(unit, one, machine) for unit, one in zip(profile.units, placements, strict=True)]
        self.top_seconds = ends_seconds(profile, machine)
        self.update_seconds = sum(times.update for times in self.times) + ends_update(profile, machine)
        resident = sum(cost.resident for cost in self.costs)
        self.arena = Arena(budget, profile.base + staging(profile, placements) + resident)
        self.device_copy: dict[int, Any] = {}
        self.updated, self.refreshed, self.written = (
            [engine.event(True) for _ in self.costs] for _ in ("updated", "refreshed", "written")
        )
        self.counted, self.slots = MovedBytes(), Slots(self)
        self._updates = Arena(SLOTS)  # updates with states in memory, at most SLOTS
        self._swapped: dict[tuple[int, int], Any] = {}  # by pass and unit
        self._out: dict[tuple[int, int], LaneEvent] = {}  # by pass and unit: event that its activations are on the host

    # A pass

    def ask(self, half: Half, urgency: Callable[[PassTask], Urgency]) -> dict[PassTask, list[LaneEvent]]:
        """Request all bytes of a half, and submit its transfers; returns the events that each task waits for."""
        if half.kind == "forward":
            self._out |= {(half.number, index): self.engine.event() for index in range(len(self.costs))}
        return {task: self._needs(task, half, urgency(task)) for task in half.tasks(len(self.costs))}

    def _needs(self, task: PassTask, half: Half, urgency: Urgency) -> list[LaneEvent]:
        ends, index = self.ends, task.unit
        if task.kind == "top":
            return [self._granted(ends.top + ends.top_gradients + ends.carried)]
        if task.kind == "bottom":
            return [self._granted(ends.bottom + ends.bottom_gradients)]
        cost, needs = self.costs[index], list[LaneEvent]()
        if cost.slot:
            needs.append(self.slots.ask(SlotUse(half, index), urgency))
        elif cost.refreshed and half.kind == "forward":
            needs.append(self.refreshed[index])
        if half.kind == "forward":
            return [*needs, self._granted(cost.forward)]
        if cost.swap:
            back = self.engine.event()
            needs.append(back)
            self.arena.want(cost.swap, partial(self._swap_granted, (half.number, index), urgency, back))
        needs.append(self._granted(cost.backward + cost.gradients))
        return needs

    def _granted(self, nbytes: float) -> LaneEvent:
        event = self.engine.event()
        self.arena.want(nbytes, event.fire)
        return event

    def _swap_granted(self, key: tuple[int, int], urgency: Urgency, back: LaneEvent) -> None:
        def fetch() -> None:
            swapped = self._swapped[key]
            self.counted.add("up", swapped.nbytes)
            seconds = self.times[key[1]].swap_up
            self.submit("up", urgency, seconds, swapped.to_device, back.fire, f"activations {key[1]}")

        self._out[key].then(fetch)

    def forward_ends(self, half: Half, index: int, urgency: Urgency, swapped: Any) -> None:
        """swapped: the unit's saved tensors, if they are swapped: `nbytes`, `to_host`, `to_device`."""
        cost, key = self.costs[index], (half.number, index)
        if cost.slot:
            self.slots.used(SlotUse(half, index))
        if cost.swap:
            self._swapped[key], out = swapped, self._out[key]

            def released() -> None:
                self.arena.free(cost.swap)
                out.fire()

            self.counted.add("down", swapped.nbytes)
            seconds = self.times[index].swap_down
            self.submit("down", urgency, seconds, swapped.to_host, released, f"activations {index}")
        self.arena.free(cost.forward_end + cost.slot)

    def top_ends(self, *, first: bool) -> None:
        """first: whether it is the first pass of the step, here and below: later ones add to existing gradients."""
        gradients = 0 if first else self.ends.top_gradients
        self.arena.free(self.ends.top + gradients + sum(cost.casts_end for cost in self.costs))

    def backward_ends(
        self, half: Half, index: int, urgency: Urgency, *, first: bool, send: LaneAction, landed: LaneAction
    ) -> None:
        """send: moves the gradients of a unit to the host; `landed` is called after it."""
        cost, key = self.costs[index], (half.number, index)
        self._swapped.pop(key, None)
        self._out.pop(key)
        if cost.slot:
            self.slots.used(SlotUse(half, index))
        if not cost.on_device:

            def done() -> None:
                self.arena.free(cost.gradients)
                landed()

            if not cost.filed:
                self.counted.add("down", cost.sent)
            lane: EngineLane = "write" if cost.filed else "down"
            self.submit(lane, urgency, self.times[index].gradients, send, done, f"gradients {index}")
        held = cost.gradients if cost.on_device and not first else 0
        self.arena.free(cost.backward_end + cost.slot + held)

    def bottom_bytes(self, *, first: bool) -> int:
        """Bytes that the end of a backward pass frees."""
        return self.ends.bottom + self.ends.carried + (0 if first else self.ends.bottom_gradients)

    def drop_gradients(self) -> None:
        """Free the gradients on the device."""
        held = sum(cost.gradients for cost in self.costs if cost.on_device)
        self.arena.free(held + self.ends.top_gradients + self.ends.bottom_gradients)

    # Updates on the host

    def expect(self, index: int) -> None:
        """The unit will be updated: later requests for its weights wait for that."""
        self.updated[index], self.refreshed[index] = self.engine.event(), self.engine.event()

    def update(
        self,
        index: int,
        urgency: Urgency,
        make: Callable[[], UpdateWork],
        *,
        stored: bool,
        after: Callable[[LaneAction], None] = lambda landed: landed(),
    ) -> None:
        """Update the unit, after `expect`. make: called once there is memory for its states. stored: its states are on
        disk. after: called on the lane with the function to call once the unit's weights are complete.
        """
        cost, times, device_copy = self.costs[index], self.times[index], self.device_copy[index]
        updated, refreshed = self.updated[index], self.refreshed[index]
        what = f"update {index}"

        def landed() -> None:
            updated.fire()
            if not cost.refreshed:
                refreshed.fire()
                return
            self.counted.add("up", cost.refreshed)
            self.submit("up", urgency, times.refresh, device_copy.refresh, refreshed.fire, f"weights {index}")

        if not stored:
            self.submit("host", urgency, times.host, make().step, partial(after, landed), what)
            return
        refreshed.fire()  # there is no copy between passes
        before, written = self.written[index], self.engine.event()
        self.written[index] = written

        def begin() -> None:
            work = make()

            def stepped() -> None:
                if not cost.filed:
                    updated.fire()
                self.submit("write", urgency, times.write, work.save, saved, f"states {index}")

            def saved() -> None:
                self._updates.free(1)
                written.fire()
                if cost.filed:
                    updated.fire()

            def loaded() -> None:
                self.submit("host", urgency, times.host, work.step, stepped, what)

            self.submit("read", urgency, times.read, work.load, loaded, f"states {index}")

        before.then(partial(self._updates.want, 1, begin))
