"""The tasks of a pass in their order, the passes in flight, and the errors for a pass out of that order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal, NamedTuple

TaskKind = Literal["forward", "top", "backward", "bottom"]
PassKind = Literal["forward", "backward"]


class PassTask(NamedTuple):
    """The forward or backward pass of a unit, or what runs after the last one (top) and before the first (bottom)."""

    kind: TaskKind
    unit: int


class Half(NamedTuple):
    """A forward or a backward pass through all units. number: of the pass."""

    number: int
    kind: PassKind

    def tasks(self, units: int) -> list[PassTask]:
        if self.kind == "forward":
            return [*(PassTask("forward", index) for index in range(units)), PassTask("top", 0)]
        return [*(PassTask("backward", index) for index in reversed(range(units))), PassTask("bottom", 0)]


class PassesInFlight:
    """The passes of so many `units` that are in flight, at most `in_flight` at a time.

    What a half takes is asked for when it begins: with one pass in flight, the whole pass with its first half; with
    several, the half that follows too, where the order of a step was announced. So bytes are asked for in the order of
    their use, whatever that is.
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
        """The order of the halves of a step: their kinds, and of which pass."""
        if self.in_flight == 1:
            return
        self._ahead.clear()
        numbers = dict[object, int]()
        for kind, key in halves:
            if kind == "forward":
                numbers[key] = self.begun + len(numbers) + 1
            self._ahead.append(Half(numbers[key], kind))

    def begin(self) -> int:
        """A forward pass begins; its number."""
        self.begun += 1
        self.left[self.begun] = deque(Half(self.begun, "forward").tasks(self.units))
        self.left[self.begun].extend(Half(self.begun, "backward").tasks(self.units))
        return self.begun

    def to_ask(self, half: Half) -> list[Half]:
        """The halves to ask for when `half` begins, in their order."""
        if self.in_flight == 1:
            return [half, Half(half.number, "backward")] if half.kind == "forward" else []
        if self._ahead and half not in self._ahead and half not in self._requested:
            self._ahead.clear()  # it does not follow the announced order: nothing is known of what follows
        asked = [] if half in self._requested else [half]
        while half in self._ahead:
            self._ahead.popleft()
        if self._ahead and (not self._requested or self._requested == {half}):
            asked.append(self._ahead.popleft())
        self._requested = (self._requested | set(asked)) - {half}
        return asked

    def task(self, number: int, task: PassTask) -> bool:
        """`task` of the pass begins. False where it is not its turn."""
        left = self.left.get(number)
        if not left or left[0] != task:
            return False
        left.popleft()
        if not left:
            del self.left[number]
        return True

    def open(self, *, whole: bool) -> PassTask | None:
        """What is next of a pass that should be over; whole: as all should, not only those whose backward has begun."""
        for left in self.left.values():
            waits = self.in_flight > 1 and left[0] == PassTask("backward", self.units - 1)
            if whole or not waits:
                return left[0]
        return None


def not_followed(task: PassTask, unit: str) -> RuntimeError:
    """A pass ends before `task` of `unit` has run."""
    return RuntimeError(
        f"memory: a forward pass was not followed by its backward pass ({task.kind} of {unit} is next): run backward() "
        "after each forward pass, or use torch.no_grad() for one that needs none"
    )


def out_of_order(task: PassTask, unit: str) -> RuntimeError:
    """`task` of `unit` runs where another one is next."""
    if task.kind == "forward":
        return RuntimeError(
            f"memory: {unit} ran out of its order: blocks must run one after the other, once in each pass, and each "
            "forward pass needs its backward pass before the next"
        )
    return RuntimeError(
        f"memory: the backward pass of {unit} ran twice or out of its order: call backward() once for each forward "
        "pass, and run blocks in the order of the model"
    )
