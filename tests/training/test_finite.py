"""What is kept of a run is made of numbers: checkpoints that count, and the model in the end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isles.comm.errors import WorkerFailed
from isles.running.run import launch
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.reshard import prepare
from isles.training.records.shard import first_nan, not_finite
from tests.training.runs import POISONED, Told, metrics, run, tiny, write_text


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def test_a_checkpoint_of_broken_weights_never_counts(text: Path, tmp_path: Path) -> None:
    """Worker 1's weights break in step 3, whose loss is a number: its line names what, and the newest good one."""
    config = tiny(text, "run.checkpoint_every=1", method=POISONED, steps=9)
    with pytest.raises(WorkerFailed) as caught:
        run(config, tmp_path / "run")
    assert str(caught.value).startswith("worker 1 failed: its weights are not finite after inner step 3 (")
    assert "lower inner.lr (now 0.01)" in str(caught.value)
    assert Checkpoints(tmp_path / "run").steps() == [1, 2]
    notes = "; ".join(caught.value.__notes__)
    assert f"go on after step 2 with: isles resume {tmp_path / 'run'}" in notes and "--step 1" in notes


def test_a_last_step_that_goes_wrong_saves_no_model(text: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="worker 1 failed: its weights are not finite after inner step 3"):
        run(tiny(text, method=POISONED, steps=3), tmp_path / "run")
    there = {path.name for path in (tmp_path / "run").iterdir()}
    assert "model.safetensors" not in there and "summary.json" not in there


def test_one_goes_back_to_a_good_checkpoint(text: Path, tmp_path: Path) -> None:
    """Who goes back leaves what came after behind."""
    config = tiny(text, "run.checkpoint_every=2", "run.keep_checkpoints=0", steps=9)
    out = tmp_path / "run"
    run(config, out)
    model = (out / "model.safetensors").read_bytes()
    for name in ("model.safetensors", "summary.json"):
        (out / name).unlink()
    checkpoints = Checkpoints(out)
    with pytest.raises(ValueError, match="--step 3: no complete checkpoint of it; there are 2, 4, 6, 8"):
        prepare(out, None, step=3)
    assert prepare(out, None, step=4).step == 4
    told = Told()
    launch(config, out, told.lines.append, told.notices.append, resume=4)
    assert (out / "model.safetensors").read_bytes() == model
    assert checkpoints.steps() == [2, 4, 6, 8]
    assert len({(line["step"], line["worker"]) for line in metrics(out)}) == len(metrics(out))


def test_later_checkpoints_are_of_a_run_that_is_gone(tmp_path: Path) -> None:
    """Else they would be the newest ones, and those that count would be dropped."""
    checkpoints = Checkpoints(tmp_path)
    for step in (10, 20, 30):
        checkpoints.write_shard(step, 0, {"x": torch.zeros(1)})
        checkpoints.commit(step, [0], {}, keep=3)
    checkpoints.go_back(10)
    checkpoints.write_shard(15, 0, {"x": torch.zeros(1)})
    checkpoints.commit(15, [0], {}, keep=2)
    assert checkpoints.steps() == [10, 15]


def test_infinite_buffers_are_kept() -> None:
    mask = torch.full((2, 2), -torch.inf)
    assert not_finite({"mask": mask, "weight": torch.zeros(2)}, {"weight"}) is None
    assert not_finite({"mask": mask, "weight": mask}, {"weight"}) == "weight"
    assert not_finite({"mask": mask * 0}, {"weight"}) == "mask"
    assert first_nan({"optimizer": {"outer": {"flights": [mask * 0], "fragments": [{"anchor": mask}]}}}) is None
    assert first_nan({"model": {}, "inner": {0: {"exp_avg": mask * 0}}}) == "inner.0.exp_avg"
