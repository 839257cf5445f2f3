"""`benchmarks.gpu`, the plan for a first hour on a real GPU: here it says what it skips, and its blocks run on the fake
one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import build
from tests.device.table import ROOT

BLOCKS = ("here", "tests", "methods", "formats", "resume", "speed", "rounds", "streams", "islands", "memory")


def _ran(out: Path, *options: str) -> list[list[str]]:
    """Lines about blocks: name, how it ended, and the rest."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert not done.stderr, done.stderr
    lines = [line.split(maxsplit=4) for line in done.stdout.splitlines()]
    return [line for line in lines if line and line[0] in BLOCKS]


@pytest.mark.long
def test_without_a_gpu_each_block_says_so(tmp_path: Path) -> None:
    assert [(line[0], line[1]) for line in _ran(tmp_path)] == [(name, "skipped") for name in BLOCKS]


@pytest.mark.long(cases=0)
@pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
def test_its_blocks_run_on_the_fake_gpu(tmp_path: Path) -> None:
    """Losses are the CPU's for all methods, and a run goes on to the bit."""
    ended = {line[0]: line[1] for line in _ran(tmp_path, "--fake")}
    skipped = {"tests", "islands", "memory"}
    assert ended == {name: "skipped" if name in skipped else "done" for name in BLOCKS}
    assert "LOOK" not in (tmp_path / "methods.md").read_text()
    assert "Error" not in (tmp_path / "formats.md").read_text()
    assert "False" not in (tmp_path / "resume.md").read_text() + (tmp_path / "streams.md").read_text()
