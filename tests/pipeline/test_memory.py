"""What a worker holds of the microbatches under way, by counting every allocation of a step."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import isles
from isles.network.routing.events import in_flight
from isles.network.routing.replay import TaskSeconds
from isles.pipeline.wire import receives_ahead
from tests.pipeline import workers
from tests.pipeline.workers import SEQUENCES, SHAPE, Cell

STREAM = SEQUENCES * SHAPE.context * SHAPE.d_model * 4
IDS = SEQUENCES * (SHAPE.context + 1) * 8
MESSAGE = STREAM + SEQUENCES * (SHAPE.context + 1)  # an input lies in the message that it came with
SMALL = 64  # bytes: the one number that is left of what was sent, and losses
ENDS = 2  # messages: the one that a task begins with, and the one that it makes


class Allocations(TorchDispatchMode):
    """Bytes of all storages that operators made and that still live: of messages, which are bytes, and of all else."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = {"messages": 0, "other": 0}
        self.peak = dict(self.bytes)
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in before | self._seen:
                self._count(one.untyped_storage(), "messages" if one.dtype == torch.uint8 else "other")
        return out

    def _count(self, storage: torch.UntypedStorage, kind: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.bytes[kind] += size
        self.peak[kind] = max(self.peak[kind], self.bytes[kind])
        weakref.finalize(storage, self._forget, key, size, kind)

    def _forget(self, key: int, size: int, kind: str) -> None:
        self._seen.discard(key)
        self.bytes[kind] -= size


def peak(world: Any, cell: Cell, seconds: TaskSeconds) -> tuple[dict[str, int], int]:
    """Bytes at most in a step, of messages and of all else, and forwards held at most."""
    torch.set_num_threads(1)
    run = workers.executor(world, cell, seconds)
    run.step(1, workers.own_text(cell, world.rank, 1))  # gradients are there from now on
    run.stage.zero_grad(set_to_none=False)
    text = workers.own_text(cell, world.rank, 2)
    with Allocations() as counted:
        run.step(2, text)
    return counted.peak, run.most_held


def peaks(cell: Cell) -> list[tuple[dict[str, int], int]]:
    free = isles.Links(bandwidth=float("inf"))
    places = cell.stages * cell.replicas
    seconds = TaskSeconds(forward=[1.0] * places, loss=[0.0] * places, backward=[2.0] * places)
    return isles.run_virtual(peak, places, links=free, args=(cell, seconds), step_seconds=1.0)


@pytest.mark.parametrize(
    ("limit", "order", "home"),
    [
        ("1f1b", "plan", False),
        pytest.param("auto", "plan", True, marks=pytest.mark.long),
        pytest.param("all", "plan", False, marks=pytest.mark.long),
        pytest.param("1f1b", "arrival", False, marks=pytest.mark.long),
    ],
)
def test_recomputing_holds_inputs_and_one_stage(limit: str, order: str, home: bool) -> None:
    """At most one stage's tensors are there, whatever it computes; and of every forward that is held its input, in the
    message that it came with. Beside it lie the messages of the task under way and the receives posted ahead.
    """
    one = peaks(Cell(3, 1, 1, home=home))
    many = peaks(Cell(3, 1, 16, home=home, limit=limit, order=order, recompute=True))
    room = in_flight(limit, 1, 3)
    for stage, ((whole, _), (most, held)) in enumerate(zip(one, many, strict=True)):
        assert held <= room.get(stage, 16)
        assert most["other"] <= whole["other"] + held * (IDS + SMALL), (one, many)
        under_way = receives_ahead(room.get(stage)) + ENDS + (held if order == "arrival" else 0)  # what comes back
        assert most["messages"] <= (held + under_way) * MESSAGE + 16 * 4, (one, many)  # and losses


def test_without_it_every_microbatch_is_held_whole() -> None:
    """So the count counts."""
    one, many = peaks(Cell(3, 1, 1)), peaks(Cell(3, 1, 7, limit="all"))
    assert [held for _, held in many] == [7, 4, 1]
    for (whole, _), (most, held) in zip(one, many, strict=True):
        assert most["other"] > 0.8 * held * whole["other"], (one, many)
