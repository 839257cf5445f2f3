"""`isles compare` with its embedded settings puts the methods in the order that the field reports. Minutes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import Command

METHODS = ["none", "ddp", "localsgd", "diloco", "noloco"]


@pytest.mark.long
def test_methods_differ_as_they_should(tmp_path: Path) -> None:
    """Means over three seeds at equal tokens: data parallel is best, and those that exchange beat those that do not."""
    arguments = ["compare", "--methods", ",".join(METHODS), "--seeds", "0,1,2", "--out", "compared"]
    code, out, error = Command(*arguments, folder=tmp_path).end(patience=3600)
    assert code == 0, error
    print(out)
    summaries = json.loads((tmp_path / "compared" / "compare.json").read_text())
    assert len({summary["tokens"] for group in summaries.values() for summary in group}) == 1
    # Of the one model of the run, and of what each worker has: without exchange the first is much the worse.
    for key in ("val_loss", "val_loss_replicas"):
        loss = {name: sum(summary[key] for summary in summaries[name]) / 3 for name in METHODS}
        assert min(loss, key=lambda name: loss[name]) == "ddp", loss
        assert loss["noloco"] <= loss["none"] - 0.03, loss
        assert loss["diloco"] <= loss["none"] - 0.05, loss
