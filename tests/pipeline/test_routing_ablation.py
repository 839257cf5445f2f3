"""NoLoCo's claim for random routing (arXiv 2506.10911, section 3.1): it keeps replicas alike, without an outer step."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.training.config.reading import read_config
from tests.training.runs import run

TOY = ["model.d_model=32", "model.layers=4", "model.heads=2", "model.ffn=64", "model.context=32", "data.batch_size=4",
       "inner.lr=0.003", "inner.warmup_steps=10", "run.log_every=100", "world.backend=virtual", "pipeline.stages=4",
       "pipeline.microbatches=2"]  # fmt: skip
FLAGS = {"replicas.method": "none", "world.workers": 8, "run.steps": 100}


@pytest.mark.long(cases=0)
def test_random_routes_keep_replicas_alike(tmp_path: Path) -> None:
    found: dict[str, list[tuple[float, float]]] = {"fixed": [], "random": []}
    for routing, told in found.items():
        for seed in range(2):
            config = read_config(None, FLAGS, [*TOY, f"pipeline.routing={routing}", f"run.seed={seed}"])
            summary = run(config, tmp_path / f"{routing}-{seed}")
            told.append((summary["replica_std"], summary["val_loss_replicas"]))
    for name, told in found.items():
        print(name, *(f"spread {spread:.5f}, loss {loss:.4f}" for spread, loss in told), sep="\n  ")
    for (fixed, _), (random, _) in zip(*found.values(), strict=True):
        assert random < fixed, found
