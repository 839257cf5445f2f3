"""What a worker holds of the microbatches under way, by counting every allocation of a step."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import isles
from isles.network.routing.replay import TaskSeconds
from tests.pipeline import workers
from tests.pipeline.workers import SEQUENCES, SHAPE, Cell

INPUT = SEQUENCES * SHAPE.context * SHAPE.d_model * 4 + SEQUENCES * (SHAPE.context + 1) * 8  # stream and ids
SMALL = 64  # bytes: the one number that is left of what was sent, and losses
MESSAGE = SEQUENCES * SHAPE.context * SHAPE.d_model * 4 + SEQUENCES * (SHAPE.context + 1)
ON_THE_WAY = 10  # messages: receives are posted eight ahead, and what was sent has to leave


class Allocations(TorchDispatchMode):
    """Bytes of all storages that operators made and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in before | self._seen:
                self._count(one.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.bytes -= size


def peak(world: Any, cell: Cell, seconds: TaskSeconds) -> tuple[int, int]:
    """Bytes at most in a step, and forwards held at most."""
    torch.set_num_threads(1)
    run = workers.executor(world, cell, seconds)
    run.step(1, workers.own_text(cell, world.rank, 1))  # gradients are there from now on
    run.stage.zero_grad(set_to_none=False)
    text = workers.own_text(cell, world.rank, 2)
    with Allocations() as counted:
        run.step(2, text)
    return counted.peak, run.most_held


def peaks(microbatches: int, *, recompute: bool) -> list[tuple[int, int]]:
    cell = Cell(3, 1, microbatches, limit="all", recompute=recompute)
    free = isles.Links(bandwidth=float("inf"))
    seconds = TaskSeconds(forward=[1.0] * 3, loss=[0.0] * 3, backward=[2.0] * 3)
    return isles.run_virtual(peak, 3, links=free, args=(cell, seconds), step_seconds=1.0)


def test_recomputing_holds_inputs_and_one_stage() -> None:
    """Every forward that is held is its input, whatever the stage computes; at most one stage's tensors are there."""
    one, many = peaks(1, recompute=False), peaks(16, recompute=True)
    for (whole, _), (most, held) in zip(one, many, strict=True):
        assert most <= whole + (held - 1) * (INPUT + SMALL) + ON_THE_WAY * MESSAGE, (one, many)


def test_without_it_every_microbatch_is_held_whole() -> None:
    """So the count counts."""
    one, many = peaks(1, recompute=False), peaks(7, recompute=False)
    assert [held for _, held in many] == [7, 4, 1]
    assert all(most > 0.8 * held * whole for (whole, _), (most, held) in zip(one, many, strict=True)), (one, many)
