"""Three hundred steps over real processes: nothing grows."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import isles
from tests.pipeline import workers
from tests.pipeline.workers import Cell

STEPS, SETTLED = 300, 60


def held() -> tuple[int, int, int]:
    """Threads of this process that wait for messages, its other ones, and its resident KiB."""
    status = Path("/proc/self/status").read_text()
    threads, kib = (int(re.search(rf"^{key}:\s+(\d+)", status, re.MULTILINE)[1]) for key in ("Threads", "VmRSS"))  # type: ignore[index]
    waiting = sum(one.name == "isles-waiter" for one in threading.enumerate())
    return waiting, threads - waiting, kib


def soak(world: Any, cell: Cell) -> list[tuple[int, int, int]]:
    """`held` after each step."""
    torch.set_num_threads(1)
    run, seen = workers.executor(world, cell), []
    for step in range(1, STEPS + 1):
        run.stage.zero_grad()
        run.step(step, workers.own_text(cell, world.rank, step))
        seen.append(held())
    return seen


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_threads_and_memory_stay_as_they_are() -> None:
    """Each message waits on a thread of a pool that is as large as ever waited at once. A worker has two messages of
    each microbatch that visits it, and those of a step may all wait together: so many threads, now or later, no more.
    """
    cell = Cell(2, 2, 2, "random")
    for seen in isles.run_local(soak, 4, args=(cell,)):
        waiting, others, kibibytes = zip(*seen, strict=True)
        print(f"{min(waiting)}-{max(waiting)} waiting and {max(others)} other threads; {max(kibibytes) / 1024:.1f} MiB")
        assert max(waiting) <= 2 * cell.microbatches
        assert set(others) == {others[0]}
        assert max(kibibytes[STEPS // 2 :]) <= max(kibibytes[SETTLED : STEPS // 2]) * 1.01
