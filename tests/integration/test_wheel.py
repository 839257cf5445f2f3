"""A wheel of this checkout, in an empty environment: everything that `isles train` needs is in it."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def done(*command: object, folder: Path) -> str:
    finished = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True, timeout=900)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    return finished.stdout


@pytest.mark.long
def test_a_wheel_installs_into_an_empty_environment_and_runs_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built, installed with its dependencies as pinned, and run in a directory without a checkout."""
    monkeypatch.delenv("PYTHONPATH")
    done(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT, folder=tmp_path)
    (wheel,) = tmp_path.glob("isles-*.whl")
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    done(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, folder=tmp_path)
    isles = tmp_path / "empty" / "bin" / "isles"
    assert "isles.replicas" not in done(isles, "--help", folder=tmp_path)
    assert str(tmp_path / "empty") in done(python, "-c", "import isles; print(isles.__file__)", folder=tmp_path)
    told = done(isles, "train", "--steps", 60, "--out", "demo", folder=tmp_path)
    assert "validation loss" in told
    for name in ("summary.json", "model.safetensors", "report.html"):
        assert (tmp_path / "demo" / name).is_file()
