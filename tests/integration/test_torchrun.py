"""`torchrun ... -m isles train`: the processes are torchrun's, the run is the same."""

from __future__ import annotations

import re
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isles.running.run import launch
from isles.running.torchrun import take_part
from isles.training.config.reading import read_config
from isles.training.records.checkpoint import Checkpoints
from tests import forked
from tests.cli.command import Command, eventually, gone
from tests.training.runs import metrics, tiny, without_clocks, write_folder, write_text

AGENT = ["--local-addr", "127.0.0.1"]  # else it hangs where the machine's own name does not resolve
AGENT += ["--nproc-per-node", "2", "-m", "isles"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", *AGENT]


def forked_torchrun(words: list[str]) -> None:
    """In this process torchrun, but that it forks its processes where it would start Pythons that load torch."""
    from torch.distributed import run

    launch = run.elastic_launch

    def forking(config: Any, entrypoint: str) -> Callable[..., Any]:
        return lambda *_: launch(replace(config, start_method="fork"), isles)(*words)

    run.elastic_launch = forking  # type: ignore[assignment]
    run.run(run.parse_args([*AGENT, *words]))


def isles(*words: str) -> None:
    """The command as one of torchrun's processes."""
    try:
        forked.command(words)
    except SystemExit as end:
        if end.code:
            raise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("user"))


def lines(run: Path) -> list[str]:
    return sorted(str(without_clocks(line)) for line in metrics(run))


@pytest.mark.parametrize("is_forked", [True, pytest.param(False, marks=pytest.mark.long)], ids=["forked", "torchrun"])
def test_the_same_run(is_forked: bool, tmp_path: Path) -> None:
    """Two workers that torchrun has started give the metrics and the model of any other backend; one table is shown."""
    folder = write_folder(tmp_path)
    words = ["train", "tiny.toml", "--steps", "6", "--set", "run.checkpoint_every=3", "--out", "run"]
    command = (
        forked.Process(forked_torchrun, words, folder=folder)
        if is_forked
        else Command(*words, folder=folder, program=TORCHRUN)
    )
    code, out, error = command.end()
    assert code == 0, error
    assert out.count("noloco: 2 workers, 6 steps") == out.count("report  run/report.html") == 1
    assert eventually(lambda: not command.left())
    flags = {"world.workers": 2, "run.steps": 6}
    config = read_config(
        str(folder / "tiny.toml"), flags, [f"data.path={folder / 'text.txt'}", "world.backend=virtual"]
    )
    launch(config, folder / "alone", lambda line: None, lambda notice: None)
    assert lines(folder / "run") == lines(folder / "alone")
    models = [(folder / run / "model.safetensors").read_bytes() for run in ("run", "alone")]
    assert models[0] == models[1]
    assert Checkpoints(folder / "run").steps() == [3, 6]


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "3"], "isles: world.workers = 3, but torchrun started 2 processes"),
        (["--set", "run.stepz=3"], "isles: unknown key 'run.stepz'"),
        (["--steps", "2"], "isles: replicas.sync_every: no exchange falls into a run of 2 steps"),
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


def test_signals_mean_what_they_did_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On rank 0, once its run has ended well."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port}.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    config = tiny(write_text(tmp_path / "text.txt"), "world.backend=distributed", method="none", workers=1, steps=2)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    ended = take_part(config, lambda: tmp_path / "run", lambda line: None, lambda notice: None, None)
    assert ended is not None and ended[1]["steps"] == 2
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)] == before
