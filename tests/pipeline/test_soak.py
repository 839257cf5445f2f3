"""Three hundred steps over real processes: nothing grows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import isles
from tests.pipeline import workers
from tests.pipeline.workers import Cell

STEPS, SETTLED = 300, 60


def held() -> tuple[int, int]:
    """Threads of this process, and its resident KiB."""
    status = Path("/proc/self/status").read_text()
    return tuple(int(re.search(rf"^{key}:\s+(\d+)", status, re.MULTILINE)[1]) for key in ("Threads", "VmRSS"))  # type: ignore[index, return-value]


def soak(world: Any, cell: Cell) -> list[tuple[int, int]]:
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
    for seen in isles.run_local(soak, 4, args=(Cell(2, 2, 4, "random"),)):
        settled, end = seen[SETTLED : STEPS // 2], seen[STEPS // 2 :]
        threads, kibibytes = zip(*settled, strict=True)
        print(f"threads {min(threads)}-{max(threads)}, {max(kibibytes) / 1024:.1f} MiB; at the end {end[-1]}")
        assert max(one for one, _ in end) <= max(threads)
        assert max(kib for _, kib in end) <= max(kibibytes) * 1.01, (kibibytes[0], end[-1])
