"""About 50M parameters in 600 MB: a machine without a GPU whose RAM is the device and whose disk is the far tier."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LIMIT = 600 * 10**6
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")

pytestmark = pytest.mark.long


@pytest.fixture
def limited() -> Iterator[Path]:
    """The file that takes a process into a memory cgroup of `LIMIT` bytes."""
    root, key = (_V1, "memory.limit_in_bytes") if _V1.is_dir() else (_V2, "memory.max")
    group = root / f"isles-{os.getpid()}"
    try:
        group.mkdir()
        (group / key).write_text(str(LIMIT))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no right to make a memory cgroup ({error.strerror})")
    yield group / "cgroup.procs"
    group.rmdir()


def _run(folder: Path | None, procs: Path | None = None) -> tuple[int, dict[str, Any]]:
    def enter() -> None:
        if procs is not None:
            procs.write_text(str(os.getpid()))

    words = [sys.executable, "-m", "tests.memory.out_of_core", "plain" if folder is None else str(folder), "4"]
    done = subprocess.run(words, preexec_fn=enter, capture_output=True, text=True, timeout=1200, check=False)
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else {}


def _moves_what_it_should(got: dict[str, Any]) -> None:
    steps, states = len(got["seconds"]), got["states"]
    assert got["moved"]["write"] == steps * got["formula_written"]
    assert got["moved"]["read"] <= steps * got["formula_read"] - states
    assert got["moved"]["read"] >= 0.9 * steps * got["formula_read"] - states  # blocks that stay from forward on


def test_a_model_that_the_memory_cannot_hold(limited: Path, tmp_path: Path) -> None:
    assert _run(None, limited)[0] in (-9, 137)  # killed
    code, got = _run(tmp_path, limited)
    assert code == 0
    wanted = _run(None)[1]
    assert got["losses"] == wanted["losses"]
    assert got["weights"] == wanted["weights"]
    _moves_what_it_should(got)


def test_a_model_on_disk_keeps_its_bits_in_half_the_memory(tmp_path: Path) -> None:
    code, got = _run(tmp_path)
    assert code == 0
    wanted = _run(None)[1]
    assert got["losses"] == wanted["losses"]
    assert got["weights"] == wanted["weights"]
    assert got["anonymous"] < 0.5 * wanted["anonymous"]
    _moves_what_it_should(got)
