"""Runs that are hit: a worker killed at a random moment, everything killed between a shard and its manifest, a full
disk. Real processes; what is left on the disk is what a user would find.
"""

from __future__ import annotations

import multiprocessing.forkserver
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from isles.comm.errors import WorkerFailed
from isles.running.run import launch
from isles.training.config.reading import read_config
from isles.training.records.checkpoint import Checkpoints
from tests import gloo
from tests.cli.command import Command, eventually, gone
from tests.training.runs import Told, metrics, tiny, without_clocks, write_folder, write_text

NAMED = 5.0  # seconds within which a killed worker is named


def workers() -> list[psutil.Process]:
    """Worker processes of this test process, but for those that its other tests share."""
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    shared = gloo.processes()
    children = [] if server is None else psutil.Process(server).children()
    return [child for child in children if child.pid not in shared and alive(child)]


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def resumed(run: Path, note: str, **settings: Any) -> None:
    """Do what the error's note says."""
    found = re.fullmatch(r"go on after step (\d+) with: isles resume (.+)", note)
    assert found and found[2] == str(run), note
    launch(settings["config"], run, lambda line: None, lambda notice: None, resume=int(found[1]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A configuration, and its run without any fault."""
    folder = tmp_path_factory.mktemp("whole")
    text = write_text(folder / "text.txt")
    config = tiny(text, "world.backend=distributed", "run.checkpoint_every=20", workers=3, steps=300)
    launch(config, folder / "run", lambda line: None, lambda notice: None)
    return config, folder / "run"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_a_worker_killed_at_a_random_moment(whole: tuple[Any, Path], tmp_path: Path, seed: int) -> None:
    """Named within five seconds, no process stays, and the note on the error goes on to the bits of the whole run, or
    says that there was no checkpoint.
    """
    config, reference = whole
    draw, run, struck = random.Random(seed), tmp_path / "run", []

    def strike() -> None:
        while len(victims := workers()) < 3:
            time.sleep(0.01)
        if seed:  # 0: while they join
            while not (run / "config.toml").exists():
                time.sleep(0.01)
            time.sleep(draw.uniform(0.0, 0.5))
        victim = draw.choice(victims)
        victim.kill()
        struck.append((victim, time.monotonic()))

    assassin = threading.Thread(target=strike)
    assassin.start()
    with pytest.raises(WorkerFailed, match=r"worker \d failed: its process ended with exit code -9") as caught:
        launch(config, run, lambda line: None, lambda notice: None)
    assassin.join()
    assert time.monotonic() - struck[0][1] < NAMED
    assert not workers()
    (note,) = caught.value.__notes__
    if not Checkpoints(run).steps():
        assert note.startswith("there was no checkpoint yet")
        return
    resumed(run, note, config=config)
    assert (run / "model.safetensors").read_bytes() == (reference / "model.safetensors").read_bytes()
    lines = [sorted(str(without_clocks(line)) for line in metrics(folder)) for folder in (run, reference)]
    assert lines[0] == lines[1]


STALLS = """
import os, time
import isles

class Stalls(isles.NoSync):
    def after_inner_step(self):
        while self.steps == 8 and self.group.rank == 1 and os.path.exists("stall"):
            time.sleep(0.05)
"""


@pytest.mark.long
def test_killed_between_a_shard_and_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint before counts, and the run goes on from it."""
    folder = write_folder(tmp_path)
    (folder / "stalls.py").write_text(STALLS)
    (folder / "none.toml").write_text((folder / "tiny.toml").read_text().replace("sync_every = 3", ""))
    (folder / "stall").touch()
    command = Command("train", "none.toml", "--workers", "2", "--steps", "10", "--method", "stalls:Stalls",
                      "--set", "run.checkpoint_every=4", "--out", "run", folder=folder)  # fmt: skip
    whole, half = (folder / "run" / "checkpoints" / f"step-{step}" for step in (4, 8))
    assert eventually(lambda: (half / "worker-0.safetensors").exists() and (whole / "manifest.json").exists())
    command.process.kill()
    command.end()
    assert gone(command.mark)
    assert not (half / "manifest.json").exists() and Checkpoints(folder / "run").steps() == [4]
    (folder / "stall").unlink()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    told = Told()
    launch(read_config("run/config.toml", {}, []), Path("run"), told.lines.append, told.notices.append, resume=4)
    assert [line["step"] for line in told.lines if line["worker"] == 1] == [6, 8, 10]
    assert Checkpoints(folder / "run").steps() == [4, 8]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("a small disk: needs root on Linux, and mount")
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if made.returncode != 0:
        pytest.skip(f"a small disk: mount says {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.long
def test_a_disk_that_fills_up(whole: tuple[Any, Path], small_disk: Path) -> None:
    """One line that says so, whoever notices first; no process stays."""
    config = replace(whole[0], run=replace(whole[0].run, checkpoint_every=2, keep_checkpoints=0))
    with pytest.raises((OSError, WorkerFailed)) as caught:
        launch(config, small_disk / "run", lambda line: None, lambda notice: None)
    assert "No space left on device" in str(caught.value) and "\n" not in str(caught.value)
    assert not workers()


def test_each_workers_prints_are_in_its_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And not on the terminal."""
    text = write_text(tmp_path / "text.txt")
    config = tiny(text, "world.backend=distributed", method="tests.training.printing:Prints", workers=2, steps=3)
    launch(config, tmp_path / "run", lambda line: None, lambda notice: None)
    assert "of worker" not in "".join(capfd.readouterr())
    logs = {path.name: path.read_text() for path in (tmp_path / "run" / "logs").iterdir()}
    assert logs == {f"worker-{w}.log": "".join(f"step {s} of worker {w}\n" for s in (1, 2, 3)) for w in (0, 1)}
