"""SIGTERM to a peer means leave, to the launcher or to all of them stop; nothing is lost either way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.cli.command import isles
from tests.training.swarm.test_swarm import fragile, furthest

CLOSE = 1e-12


def run(folder: Path, stage: int, after: int, *more: str, times: int = 1) -> tuple[int, str]:
    (folder / "plain.toml").write_text("")
    words = fragile(folder / "mark", stage, after, *more, name="SIGTERM", times=times)
    code, _, error = isles("train", "plain.toml", "--out", "run", *words, folder=folder)
    return code, error


def model(folder: Path) -> dict[str, Tensor]:
    return load_file(str(folder / "run" / "model.safetensors"))


@pytest.fixture(scope="module")
def well(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("well")
    code, error = run(folder, 1, 0)
    assert code == 0, error
    return model(folder)


@pytest.mark.long
@pytest.mark.parametrize(("stage", "after", "times"), [(1, 3, 2), (0, 7, 1), (2, 9, 1), (1, 1, 1), (0, 1, 1)])
def test_peers_that_are_asked_leave_and_nothing_is_lost(
    stage: int, after: int, times: int, well: dict[str, Tensor], tmp_path: Path
) -> None:
    code, error = run(tmp_path, stage, after, times=times)
    assert code == 0, error
    assert error.count("as it was asked to") == times and "failed" not in error
    assert furthest(model(tmp_path), well) < CLOSE
    assert "repaired" not in error


@pytest.mark.long
def test_somebody_takes_the_place_of_the_last_of_a_stage(well: dict[str, Tensor], tmp_path: Path) -> None:
    code, error = run(tmp_path, 1, 9, "pipeline.swarm.peers=[2,1,2]", "world.workers=5")
    assert code == 0, error
    assert "to stage 1 before step" in error and "worker 2 has left after step" in error, error
    assert furthest(model(tmp_path), well) < CLOSE


@pytest.mark.long
def test_where_nobody_can_all_stop_and_are_resumed(tmp_path: Path) -> None:
    alone = ("pipeline.swarm.peers=[1,1,1]", "world.workers=3", "run.steps=40")  # it has steps left when it hears of it
    code, error = run(tmp_path, 1, 9, *alone)
    assert code == 130 and "the last of stage 1, with no peer to take its place" in error, error
    code, _, error = isles("resume", "run", "--trust", folder=tmp_path)
    assert code == 0, error
    (tmp_path / "well").mkdir()
    code, error = run(tmp_path / "well", 1, 0, *alone)
    assert code == 0, error
    assert furthest(model(tmp_path), model(tmp_path / "well")) < CLOSE


@pytest.mark.long
@pytest.mark.parametrize("everybody", [True, False])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_to_the_launcher_stops_all(
    name: str, everybody: bool, well: dict[str, Tensor], tmp_path: Path
) -> None:
    """And so it is where a scheduler sends it, or a terminal Ctrl-C, to every process at once."""
    (tmp_path / "plain.toml").write_text("")
    words = fragile(tmp_path / "mark", 1, 0, "run.log_every=1", "run.steps=5000")
    command = [sys.executable, "-m", "isles", "train", "plain.toml", "--out", "run", *words]
    started = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    until = time.monotonic() + 120
    while not metrics.exists() or metrics.stat().st_size < 1000:
        assert time.monotonic() < until and started.poll() is None
        time.sleep(0.1)
    (os.killpg if everybody else os.kill)(started.pid, signal.Signals[name])
    _, error = started.communicate(timeout=120)
    assert started.returncode == 130 and "checkpoint saved" in error, error
    config = tmp_path / "run" / "config.toml"
    assert "steps = 5000" in config.read_text()
    # Not those that have ended and that nobody has asked for their exit code.
    while subprocess.run(["pgrep", "-r", "D,R,S,T", "-g", str(started.pid)], capture_output=True, check=False).stdout:
        assert time.monotonic() < until
        time.sleep(0.2)
