"""The main job as it comes: `isles train` without a word of configuration, four processes over gloo, 800 steps; and
with every replica in two stages.
"""

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
        [ISLES, "train", "--out", "run", *arguments], cwd=folder, capture_output=True, text=True, timeout=2400
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


@pytest.mark.long
def test_the_embedded_run_in_stages_trains_as_well_as_unsplit(tmp_path: Path) -> None:
    """At most 1.58 nats a byte and 0.05 above two whole replicas; the simulated network gives the same bits."""
    stages = ["--set", "pipeline.stages=2", "--set", "pipeline.routing=random"]
    asked = {"real": stages, "virtual": [*stages, "--set", "world.backend=virtual"], "whole": ["--workers", "2"]}
    done = {}
    for name, arguments in asked.items():
        (tmp_path / name).mkdir()
        done[name] = train(tmp_path / name, *arguments)
        print(name, {key: done[name].get(key) for key in ("val_loss", "replica_std", "pipeline_bubble")})
    real, virtual, whole = done.values()
    assert (real["method"], real["backend"], real["workers"], real["stages"]) == ("noloco", "distributed", 4, 2)
    assert real["steps"] == 800 and real["parameters"] == whole["parameters"] and real["tokens"] == whole["tokens"]
    assert real["val_loss"] <= 1.58
    assert real["val_loss"] <= whole["val_loss"] + 0.05
    weights = [(tmp_path / name / "run" / "model.safetensors").read_bytes() for name in ("real", "virtual")]
    assert weights[0] == weights[1] and real["val_loss"] == virtual["val_loss"]
    assert real["bytes_sent_per_worker"] == virtual["bytes_sent_per_worker"]
