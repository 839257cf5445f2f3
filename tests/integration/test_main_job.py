"""The main job as it comes: `isles train` without a word of configuration, four processes over gloo, 800 steps."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ISLES = str(Path(sys.executable).with_name("isles"))


def train(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run to the end in `folder`; the summary, with the resolved configuration as "config"."""
    done = subprocess.run(
        [ISLES, "train", "--out", "run", *arguments], cwd=folder, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    assert "report  run/report.html" in done.stdout
    run = folder / "run"
    assert (run / "report.html").exists() and (run / "model.safetensors").exists()
    return json.loads((run / "summary.json").read_text()) | {"config": tomllib.loads((run / "config.toml").read_text())}


@pytest.mark.long
def test_the_embedded_run_trains_well_and_better_than_alone(tmp_path: Path) -> None:
    """At most 1.90 nats a byte, and 0.03 or more below workers that train alone on as many tokens."""
    (tmp_path / "noloco").mkdir()
    (tmp_path / "none").mkdir()
    noloco, alone = train(tmp_path / "noloco"), train(tmp_path / "none", "--method", "none")

    assert (noloco["method"], noloco["backend"], noloco["workers"], noloco["steps"]) == (
        "noloco",
        "distributed",
        4,
        800,
    )
    assert noloco["config"]["replicas"]["sync_every"] == 20
    assert 0.12e6 <= noloco["parameters"] <= 0.14e6
    assert (alone["tokens"], alone["corpus_sha256"]) == (noloco["tokens"], noloco["corpus_sha256"])
    assert noloco["val_loss_replicas"] <= 1.90
    assert noloco["val_loss_replicas"] <= alone["val_loss_replicas"] - 0.03
    assert noloco["val_loss"] <= noloco["val_loss_replicas"] + 0.01  # the one model is no worse than its replicas
    assert noloco["bytes_sent_per_worker"] < noloco["ddp_bytes_per_worker"] / 10
