"""A run that went on from a checkpoint is the run that never stopped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from isles.training.records.checkpoint import Checkpoints
from isles.training.records.writer import cut_metrics
from isles.training.running.run import launch
from tests.training.runs import ON_VIRTUAL, Told, metrics, run, tiny, without_clocks, write_text

CORE = {"noloco", "streaming-diloco", "dilocox"}  # from every checkpoint, the rest from one amid a round
QUICK = CORE | {
    "none",
    "ddp",
    "diloco",
    "delayed",
    "sparseloco",
    "demo",
    "ist",
    "custom",
}  # the rest in `make test-long`
CASES = [
    *(pytest.param(name, [], marks=() if name in QUICK else pytest.mark.long) for name in ON_VIRTUAL),
    ("noloco", ["inner.accumulation=2", "replicas.anchor_codec=int8"]),
]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


@pytest.mark.parametrize(("name", "more"), CASES)
def test_every_method_goes_on_bit_for_bit(text: Path, tmp_path: Path, name: str, more: list[str]) -> None:
    """From a checkpoint of a run (between rounds, at them, with anchors under way): the same metrics, virtual clock
    included, and the same model, as the run that took the checkpoints and went on.
    """
    check_resume(text, tmp_path, name, more, (2, 4, 6) if name in CORE else (4,))


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ON_VIRTUAL if name not in CORE])
def test_every_method_goes_on_from_every_checkpoint(text: Path, tmp_path: Path, name: str) -> None:
    check_resume(text, tmp_path, name, [], (2, 6))


def check_resume(text: Path, tmp_path: Path, name: str, more: list[str], steps: tuple[int, ...]) -> None:
    config = tiny(
        text, "run.checkpoint_every=2", "run.keep_checkpoints=0", "run.log_every=1", *more, method=name, steps=9
    )
    whole = tmp_path / "whole"
    run(config, whole)
    assert Checkpoints(whole).steps() == [2, 4, 6, 8]
    for step in steps:
        copy = tmp_path / f"from-{step}"
        shutil.copytree(whole, copy)
        (copy / "summary.json").unlink()
        (copy / "model.safetensors").unlink()
        told = Told()
        launch(config, copy, told.lines.append, told.notices.append, resume=step)
        assert min(line["step"] for line in told.lines) == step + 1
        assert sorted(map(str, metrics(copy))) == sorted(map(str, metrics(whole)))
        assert (copy / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_real_processes_go_on_too(text: Path, tmp_path: Path) -> None:
    """The same over gloo, but for what the host's clock measured."""
    config = tiny(text, "world.backend=distributed", "run.checkpoint_every=4", "run.log_every=1", steps=8, workers=3)
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    run(config, whole)
    shutil.copytree(whole, copy)
    (copy / "summary.json").unlink()
    told = Told()
    launch(config, copy, told.lines.append, told.notices.append, resume=4)
    lines = [[without_clocks(line) for line in metrics(folder)] for folder in (whole, copy)]
    assert sorted(map(str, lines[0])) == sorted(map(str, lines[1]))
    assert (copy / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_metrics_beyond_the_checkpoint_are_cut(tmp_path: Path) -> None:
    """And a last line that was cut off in writing."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    cut_metrics(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
