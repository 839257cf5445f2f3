"""Whole runs with islands and with fsdp: the plan's bytes, checkpoints, one model, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from isles.plan.run_plan import plan_run
from isles.running.run import launch
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.reshard import prepare
from tests.training.runs import Told, metrics, run, tiny, without_clocks, write_text

REAL = "world.backend=distributed"
STOPS = ["run.checkpoint_every=4", "run.log_every=1", "run.validate_every=0"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


@pytest.mark.parametrize(
    ("method", "more", "workers"),
    [
        ("diloco", ["world.inner=2"], 4),
        pytest.param(
            "noloco",
            [REAL, "world.inner=2", "world.inside=fsdp", "model.tie_embeddings=true"],
            4,
            marks=pytest.mark.long,
        ),
        pytest.param("fsdp", [REAL, "inner.accumulation=2"], 2, marks=pytest.mark.long),
    ],
)
def test_a_run_is_planned_stopped_and_gone_on_with(
    text: Path, tmp_path: Path, method: str, more: list[str], workers: int
) -> None:
    """Bytes as planned, worker by worker; from its checkpoint the same metrics and model, bit for bit."""
    config = tiny(text, *STOPS, *more, method=method, workers=workers, steps=7)
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    run(config, whole)
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["bytes_sent_per_worker"] == sum(plan_run(config).bytes_sent) / workers
    if method != "fsdp":
        said = plan_run(config)
        across = sum(said.outline.sent) / len(said.outline.sent) - said.outline.inside
        assert summary["islands"] == 2 and summary["bytes_across_per_worker"] == pytest.approx(across, rel=0.1)
    assert summary["workers"] == workers and summary["val_loss_replicas"] is not None
    shutil.copytree(whole, copy)
    (copy / "summary.json").unlink()
    again = Told()
    launch(config, copy, again.lines.append, again.notices.append, resume=4)
    lines = [sorted(str(without_clocks(line)) for line in metrics(folder)) for folder in (whole, copy)]
    assert lines[0] == lines[1]
    assert (copy / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.long
def test_ddp_inside_is_fsdp_inside_is_ddp_without_islands(text: Path, tmp_path: Path) -> None:
    """One island of two under an outer method that changes nothing (a mean of one): data parallel training. Weights to
    rounding, losses too.
    """
    runs = {
        "ddp": tiny(text, REAL, method="ddp", steps=6),
        "fsdp": tiny(text, REAL, method="fsdp", steps=6),
        "island": tiny(text, REAL, "world.inner=2", method="localsgd", steps=6),
        "shards": tiny(text, REAL, "world.inner=2", "world.inside=fsdp", method="localsgd", steps=6),
    }
    models = {}
    for name, config in runs.items():
        run(config, tmp_path / name)
        models[name] = load_file(tmp_path / name / "model.safetensors")
    for name in ("fsdp", "island", "shards"):
        assert set(models[name]) == set(models["ddp"])
        for key, weights in models["ddp"].items():
            torch.testing.assert_close(models[name][key], weights, rtol=0, atol=2e-6)


def test_islands_wait_for_slow_links_less_than_workers_alone(text: Path, tmp_path: Path) -> None:
    """Over a slow line the four workers of two islands send half as much each as four replicas, and wait less."""
    slow = ["world.virtual.links=home-cable", "world.virtual.step_seconds=0.01"]
    seconds = {}
    for name, more in (("replicas", []), ("islands", ["world.inner=2"])):
        run(tiny(text, *slow, *more, method="diloco", workers=4), tmp_path / name)
        seconds[name] = json.loads((tmp_path / name / "summary.json").read_text())["virtual_seconds"]
    assert seconds["islands"] < seconds["replicas"]


def test_other_numbers_of_workers_are_refused_and_change_nothing(text: Path, tmp_path: Path) -> None:
    config = tiny(text, *STOPS, "world.inner=2", method="diloco", workers=4, steps=7)
    run(config, tmp_path / "islands")
    before = {path: path.read_bytes() for path in (tmp_path / "islands").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="resume with 4 workers"):
        prepare(tmp_path / "islands", 2)
    assert Checkpoints(tmp_path / "islands").steps() == [4]
    assert {path: path.read_bytes() for path in (tmp_path / "islands").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("method", "settings", "says"),
    [
        ("fsdp", [], "needs a process for each worker"),
        ("diloco", ["world.inner=2", "world.inside=fsdp"], "needs a process for each worker"),
        ("ddp", ["world.inner=2"], "take an outer method"),
        ("diloco", ["world.inner=3"], "choose a divisor of world.workers"),
        ("diloco", ["world.inside=fsdp"], "acts within islands only"),
        ("diloco", ["world.virtual.inner_links=home-fibre"], "acts within islands only"),
        ("diloco", ["world.inner=2", "world.inside=noloco"], "inside"),
    ],
)
def test_bad_input_is_one_line_with_the_mend(text: Path, method: str, settings: list[str], says: str) -> None:
    """Before anything is started; on the virtual backend."""
    with pytest.raises(ValueError, match=says) as refused:
        plan_run(tiny(text, *settings, method=method, workers=4))
    assert "\n" not in str(refused.value)
