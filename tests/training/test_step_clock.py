"""Seconds of computing and of waiting in a run's summary."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.runs import run, tiny, write_text


def test_a_wait_for_a_checkpoint_is_no_negative_computing(tmp_path: Path) -> None:
    """Each round's means are under way when the checkpoint is made after it, over a line of 0.01 Mbit/s."""
    slow = (
        "world.backend=virtual",
        "world.virtual.links=0.01Mbit/s,50ms",
        "world.virtual.step_seconds=0.25",
        "run.checkpoint_every=3",
    )
    summary = run(tiny(write_text(tmp_path / "text.txt"), *slow, method="noloco", steps=6), tmp_path / "run")
    assert summary["blocked_seconds"] > 6 * 0.25
    assert summary["compute_seconds"] == pytest.approx(6 * 0.25)
