"""`torchrun ... -m isles train`: the processes are torchrun's, the run is the same."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from isles.training.config.reading import read_config
from isles.training.records.checkpoint import Checkpoints
from isles.training.running.run import launch
from tests.cli.command import Command, gone
from tests.training.runs import metrics, without_clocks, write_folder

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "isles"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("user"))


def lines(run: Path) -> list[str]:
    return sorted(str(without_clocks(line)) for line in metrics(run))


def test_the_same_run(folder: Path) -> None:
    """Two workers that torchrun has started give the metrics and the model of any other backend; one table is shown."""
    more = ["--steps", "6", "--set", "run.checkpoint_every=3", "--out", "run"]
    command = Command("train", "tiny.toml", *more, folder=folder, program=TORCHRUN)
    code, out, error = command.end()
    assert code == 0, error
    assert out.count("noloco: 2 workers, 6 steps") == out.count("report  run/report.html") == 1
    assert gone(command.mark)
    flags = {"world.workers": 2, "run.steps": 6}
    config = read_config(
        str(folder / "tiny.toml"), flags, [f"data.path={folder / 'text.txt'}", "world.backend=virtual"]
    )
    launch(config, folder / "alone", lambda line: None, lambda notice: None)
    assert lines(folder / "run") == lines(folder / "alone")
    models = [(folder / run / "model.safetensors").read_bytes() for run in ("run", "alone")]
    assert models[0] == models[1]
    assert Checkpoints(folder / "run").steps() == [3]


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "3"], "isles: world.workers = 3, but torchrun started 2 processes"),
        (["--set", "run.stepz=3"], "isles: unknown key 'run.stepz'"),
        (["--steps", "2"], "isles: no exchange falls into a run of 2 steps"),
        (["--method", "own:Breaks", "--steps", "6"], "isles: worker 1 failed: ZeroDivisionError: of my own making"),
    ],
    ids=["workers", "key", "refused by the workers", "breaks"],
)
def test_errors_are_told_once(folder: Path, arguments: list[str], words: str) -> None:
    """By rank 0; torchrun adds its own report of processes that ended."""
    toml = folder / "own.toml"
    text = (folder / "tiny.toml").read_text()
    toml.write_text(text.replace("sync_every = 3", "") if "own:Breaks" in arguments else text)
    command = Command("train", "own.toml", *arguments, "--out", "no", folder=folder, program=TORCHRUN)
    code, out, error = command.end()
    told = [line for line in error.splitlines() if line.startswith("isles: ")]
    assert code == 1 and out == "" and len(told) == 1 and told[0].startswith(words), error
    assert gone(command.mark)
    assert not re.search(r"^note: .*node", error, re.MULTILINE)
