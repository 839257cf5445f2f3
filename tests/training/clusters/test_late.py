"""Whole runs of two clusters whose messages are as late as they like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isles.comm.virtual.cluster import VirtualCluster
from isles.network.links import Links
from tests.training.clusters.test_clusters import config, train

pytestmark = pytest.mark.long


def made(out: Path, latency: float, order: str, patch: pytest.MonkeyPatch) -> tuple[dict[str, torch.Tensor], Any]:
    """Model and summary of a run over such links, each message of which takes a time of its own."""
    begin = VirtualCluster.__init__

    def over(own: VirtualCluster, workers: int, *, links: Any, **more: Any) -> None:
        begin(own, workers, links=Links(bandwidth=1e8, latency=latency, jitter=1.0), **more)

    patch.setattr(VirtualCluster, "__init__", over)
    more = (f"pipeline.order={order}", "pipeline.microbatches=1", "run.steps=24", "run.validate_every=8")
    summary = train(config(*more), out)
    patch.undo()
    return load_file(str(out / "model.safetensors")), summary


@pytest.mark.parametrize("order", ["plan", "arrival"])
def test_delays_of_a_second_amid_training_and_averages(
    tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three clusters of 3, 2 and 1 nodes, a second a message on average, the longest some ten: it ends; where nodes go
    by the plan, with the bits of a fast network.
    """
    fast, _ = made(tmp_path / "fast", 1e-3, order, monkeypatch)
    slow, summary = made(tmp_path / "slow", 1.0, order, monkeypatch)
    assert summary["virtual_seconds"] > 20 and summary["val_loss"] == summary["val_loss_replicas"]
    if order == "plan":
        assert all(torch.equal(fast[name], slow[name]) for name in fast)
