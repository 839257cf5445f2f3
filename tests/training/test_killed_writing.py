"""SIGKILL at random moments of checkpoint writing: the newest whole checkpoint is found, and it is right to the bit."""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from isles.training.records.checkpoint import Checkpoints
from isles.training.records.saver import StateSaver

WORKERS, KEPT = 2, 2


def state(step: int, worker: int) -> dict[str, Any]:
    """What worker `worker` writes after `step`: several hundred kB, known to all."""
    draw = torch.Generator().manual_seed(1000 * step + worker)
    tensors = [torch.randn(30_000, generator=draw) for _ in range(2)]
    return {"step": step, "of": worker, "tensors": tensors, "numbers": [step / 7] * 2000}


def write_on(folder: Path, first: int, told: int) -> None:
    """Checkpoints first, first + 1, ... for ever, behind what the workers do next, each told after its commit."""
    checkpoints, written, lock = Checkpoints(folder), Counter[int](), threading.Lock()
    savers = [StateSaver(lambda: math.inf) for _ in range(WORKERS)]

    def write(step: int, worker: int, copy: dict[str, Any]) -> None:
        checkpoints.write_shard(step, worker, copy, "here")
        with lock:
            written[step] += 1
            if written[step] == WORKERS:
                checkpoints.commit(step, range(WORKERS), {"run": "here"}, keep=KEPT)
                os.write(told, step.to_bytes(8, "little"))

    for step in range(first, first + 10_000):
        for worker, saver in enumerate(savers):
            live = state(step, worker)
            saver.save(live, partial(write, step, worker))
            for tensor in live["tensors"]:
                tensor.fill_(math.nan)  # as the next step changes them


def killed_writing(folder: Path, first: int, seconds: float) -> int:
    """The last step that was told as committed before the writer was killed; first - 1 where none was."""
    on_report, told = os.pipe()
    writer = os.fork()
    if writer == 0:  # one thread of torch: those of its pool are not there after a fork
        try:
            os.close(on_report)
            write_on(folder, first, told)
        finally:
            os._exit(1)
    os.close(told)
    time.sleep(seconds)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    steps = b""
    while piece := os.read(on_report, 1 << 16):
        steps += piece
    os.close(on_report)
    return int.from_bytes(steps[-8:], "little") if steps else first - 1


def kill_and_look(folder: Path, moments: int, seed: int) -> int:
    """So many kills, each of a writer that goes on where the one before was killed. How many fell between two parts of
    a checkpoint.
    """
    torch.set_num_threads(1)
    draw, last, between = random.Random(seed), 0, 0
    for moment in range(moments):
        committed = killed_writing(folder, last + 1, draw.uniform(0.0, 0.06))
        checkpoints = Checkpoints(folder)
        steps = checkpoints.steps()
        assert steps[-1:] == [committed] or (steps and steps[-1] == committed + 1) or (not steps and committed == 0), (
            moment,
            steps,
            committed,
        )
        for step in steps:
            for worker in range(WORKERS):
                found, right = checkpoints.read_shard(step, worker), state(step, worker)
                assert all(map(torch.equal, found.pop("tensors"), right.pop("tensors"))), (moment, step)
                assert found == right
        between += any((folder / "checkpoints").glob("*/*.partial"))
        last = steps[-1] if steps else 0
    return between


def test_ten_moments(tmp_path: Path) -> None:
    kill_and_look(tmp_path, 10, seed=1)


@pytest.mark.long
def test_two_hundred_moments(tmp_path: Path) -> None:
    assert kill_and_look(tmp_path, 200, seed=2) > 10
