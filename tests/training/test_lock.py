"""The lock of a run directory: one holder, gone with its process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isles.running.run import launch
from isles.training.records.rundir import NAME, RunLock
from tests.training.runs import tiny

HOLD = """
import pathlib, sys
from isles.training.records.rundir import RunLock
with RunLock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_second_is_told_who_holds_it(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        with pytest.raises(ValueError, match=rf"in use by another run \(process {os.getpid()}\); wait for its end"):
            with RunLock(tmp_path):
                pass
        assert (tmp_path / NAME).exists()  # the refused one took nothing away
    assert not list(tmp_path.iterdir())
    with RunLock(tmp_path):
        pass


def test_a_killed_holder_leaves_it_free(tmp_path: Path) -> None:
    """Its file stays behind, and binds nobody."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(ValueError, match=f"process {holder.pid}"), RunLock(tmp_path):
        pass
    holder.kill()
    holder.communicate()
    assert (tmp_path / NAME).exists()
    with RunLock(tmp_path):
        assert (tmp_path / NAME).read_text().strip() == str(os.getpid())


def test_a_file_that_was_taken_away_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened before the holder removed it: the lock is taken on the file that is there now."""
    import fcntl

    real, calls = fcntl.flock, []

    def slow(handle: int, how: int) -> None:
        if not calls:
            (tmp_path / NAME).unlink()  # as the holder's end does, between our opening and locking
        calls.append(handle)
        real(handle, how)

    monkeypatch.setattr("isles.training.records.rundir.fcntl.flock", slow)
    with RunLock(tmp_path):
        assert len(calls) == 2 and (tmp_path / NAME).exists()


def test_a_lock_that_was_removed_by_hand_is_noticed(tmp_path: Path) -> None:
    """Taken again while nobody else has it; where another run does, this one ends and leaves the other's alone."""
    told: list[str] = []
    with RunLock(tmp_path) as lock:
        lock.keep(told.append)
        assert not told
        (tmp_path / NAME).unlink()
        lock.keep(told.append)
        lock.keep(told.append)
        assert len(told) == 1 and "was removed while this run goes on" in told[0]
        with pytest.raises(ValueError, match="in use by another run"), RunLock(tmp_path):
            pass
        (tmp_path / NAME).unlink()
        other = RunLock(tmp_path)
        with pytest.raises(OSError, match=r"was removed while this run went on, and now .* in use by another run"):
            lock.keep(told.append)
    assert (tmp_path / NAME).exists()
    other.release()
    assert not list(tmp_path.iterdir())


def test_a_run_whose_lock_is_removed_says_so(tmp_path: Path) -> None:
    out, notices = tmp_path / "run", list[str]()

    def on_metrics(line: dict[str, object]) -> None:
        (out / NAME).unlink(missing_ok=True)

    (tmp_path / "text.txt").write_text("the quick brown fox\n" * 500)
    launch(tiny(tmp_path / "text.txt", steps=4), out, on_metrics, notices.append)
    assert any("run.lock was removed while this run goes on" in notice for notice in notices)
