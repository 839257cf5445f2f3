"""`isles train` with blocks on a disk that fills up, is cut, or is lost while it runs: one line, and exit code 1."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.command import Command

# The command, whose system calls fail from the fortieth on as those of such a disk do
FAULTY = """
import errno, os
from isles import cli
kept, calls = {name: getattr(os, name) for name in ("preadv", "pwritev")}, {"preadv": 0, "pwritev": 0}
def call(name, handle, *rest):
    calls[name] += 1
    if calls[name] >= 40:
        FAULT
    return kept[name](handle, *rest)
os.preadv = lambda *words: call("preadv", *words)
os.pwritev = lambda *words: call("pwritev", *words)
cli.main()
"""
FAULTS = {
    "full": ('if name == "pwritev": raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))', "No space left on device"),
    "cut": ('os.ftruncate(handle, 4096) if name == "preadv" else None', "before what was written to it"),
    "lost": ('if name == "preadv": raise OSError(errno.EIO, os.strerror(errno.EIO))', "Input/output error"),
}
RUN = """
[model]
layers = 8
context = 32
[data]
batch_size = 2
[world]
workers = 1
backend = "virtual"
[run]
steps = 20
[replicas]
sync_every = 5
[memory]
method = "auto"
machine = "laptop-16"
device_budget = "3.6MB"
disk = "."
"""


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_that_fails_ends_the_run_in_one_line(fault: str, tmp_path: Path) -> None:
    what, words = FAULTS[fault]
    (tmp_path / "run.toml").write_text(RUN, encoding="utf-8")
    program = [sys.executable, "-c", FAULTY.replace("FAULT", what)]
    code, _, error = Command("train", "run.toml", "--out", "out", folder=tmp_path, program=program).end()
    told = [line for line in error.splitlines() if "memory.disk" in line]
    assert code == 1, error
    assert len(told) == 1
    assert words in told[0]
    assert "Traceback" not in error
    assert not list(tmp_path.glob("isles-*"))
