"""What a pass is made of, and what is said of one that goes another way."""

from __future__ import annotations

from typing import Literal, NamedTuple

TaskKind = Literal["forward", "top", "backward", "bottom"]


class PassTask(NamedTuple):
    """The forward or backward pass of a unit, or what runs after the last one (top) and before the first (bottom)."""

    kind: TaskKind
    unit: int


def tasks_of(units: int) -> list[PassTask]:
    """Of one pass, in their order."""
    forward = [PassTask("forward", index) for index in range(units)]
    backward = [PassTask("backward", index) for index in reversed(range(units))]
    return [*forward, PassTask("top", 0), *backward, PassTask("bottom", 0)]


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
