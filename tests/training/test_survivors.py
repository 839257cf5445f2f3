"""A launched run that loses a worker: it ends, or with on_peer_failure = "solo" the others bring it to its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from isles.comm.errors import WorkerFailed
from isles.training.config.sections import Config
from tests.training.runs import Told, metrics, run_apart, tiny, write_text

STEPS = 18


def _dying(tmp_path: Path, *assignments: str, workers: int) -> Config:
    config = tiny(write_text(tmp_path / "text.txt"), "replicas.sync_every=3", "world.backend=distributed", *assignments,
                  method="tests.training.dying:DyingNoLoCo", workers=workers, steps=STEPS)  # fmt: skip
    return config


def test_survivors_bring_the_run_to_its_end(tmp_path: Path) -> None:
    """solo: worker 0, which speaks for all otherwise, is killed. The others say so, do all steps, and leave a model of
    the three of them.
    """
    told = Told()
    summary = run_apart(_dying(tmp_path, "replicas.on_peer_failure=solo", workers=4), tmp_path / "run", told)
    assert summary["workers"] == 3 and summary["val_loss"] < 5.5
    assert summary["tokens"] == 3 * STEPS * 2 * 16
    assert any("worker 0 failed" in notice and "exit code -9" in notice for notice in told.notices)
    last = [line["worker"] for line in metrics(tmp_path / "run") if line["step"] == STEPS]
    assert sorted(last) == [1, 2, 3]
    assert load_file(str(tmp_path / "run" / "model.safetensors"))


def test_by_default_the_run_fails_naming_the_worker(tmp_path: Path) -> None:
    """raise: the dead worker is named, not those that lost it."""
    with pytest.raises(WorkerFailed, match=r"worker 0 failed: its process ended with exit code -9"):
        run_apart(_dying(tmp_path, workers=2), tmp_path / "run")
