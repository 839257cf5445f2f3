"""The lock of a run directory: one holder, gone with its process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isles.training.records.lock import NAME, locked

HOLD = """
import pathlib, sys
from isles.training.records.lock import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_second_is_told_who_holds_it(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(ValueError, match=rf"in use by another run \(process {os.getpid()}\); wait for its end"):
            with locked(tmp_path):
                pass
        assert (tmp_path / NAME).exists()  # the refused one took nothing away
    assert not list(tmp_path.iterdir())
    with locked(tmp_path):
        pass


def test_a_killed_holder_leaves_it_free(tmp_path: Path) -> None:
    """Its file stays behind, and binds nobody."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(ValueError, match=f"process {holder.pid}"), locked(tmp_path):
        pass
    holder.kill()
    holder.communicate()
    assert (tmp_path / NAME).exists()
    with locked(tmp_path):
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

    monkeypatch.setattr("isles.training.records.lock.fcntl.flock", slow)
    with locked(tmp_path):
        assert len(calls) == 2 and (tmp_path / NAME).exists()
