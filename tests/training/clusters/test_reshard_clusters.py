"""Clusters whose nodes came and went, gone on with from a checkpoint as a world of fixed size: the same bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isles.training.config.reading import read_config
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.reshard import prepare
from tests.cli.command import isles
from tests.training.clusters.changing import Watched, config
from tests.training.clusters.test_clusters import lines, train
from tests.training.clusters.test_simulated import EVENTS

pytestmark = pytest.mark.long
SAVING = ("run.steps=20", "run.checkpoint_every=4", "run.keep_checkpoints=0")


def churned(folder: Path, events: list[dict[str, Any]], *more: str) -> Path:
    """The directory of a run to its end."""
    run = Watched(config(*SAVING, *more), folder, events)
    with pytest.MonkeyPatch.context() as patched:
        run.watch(patched)
        run.run()
    run.check()
    return run.out


def gone_back(out: Path, folder: Path, step: int) -> Path:
    """A copy of a run, as it was when it broke off after the checkpoint of `step`."""
    shutil.copytree(out, folder)
    for name in ("summary.json", "model.safetensors"):
        (folder / name).unlink()
    for later in (one for one in Checkpoints(folder).steps() if one > step):
        shutil.rmtree(folder / "checkpoints" / f"step-{later}")
    return folder


def losses(out: Path, after: int) -> list[list[float]]:
    """Of each worker, in its order."""
    found: dict[int, list[float]] = {}
    for line in lines(out):
        if line["step"] > after:
            found.setdefault(line["worker"], []).append(line["loss"])
    return sorted(found.values())


@pytest.mark.parametrize("step", [12, 16])
def test_clusters_that_grew_go_on_to_the_same_bits(tmp_path: Path, step: int) -> None:
    """Three clusters of six by then, one of which came later, with places that others took."""
    whole = churned(tmp_path / "a", EVENTS, "world.virtual.step_factors=[1.0, 1.01, 1.02]")
    assert Checkpoints(whole).steps() == [4, 8, 12, 16]
    cut = gone_back(whole, tmp_path / "cut", step)
    ready = prepare(cut, None)
    assert ready.step == step and ready.config.world.workers == 6 and len(ready.config.pipeline.ravnest.clusters) == 3
    assert ready.config == read_config(str(cut / "config.toml"), {}, [])
    assert "workers 0, 6, 7, 3, 4, 5 are 0 to 5 now" in ready.notes
    assert ready.config.world.virtual.step_factors == (1.0, 1.0, 1.01, 1.0, 1.01, 1.02)
    train(ready.config, cut, resume=step)
    ours, theirs = (load_file(str(out / "model.safetensors")) for out in (whole, cut))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and ours.keys() == theirs.keys()
    assert losses(whole, step) == losses(cut, step)


def test_who_stands_by_and_who_is_left_of_a_broken_cluster_are_kept(tmp_path: Path) -> None:
    """The cluster of the killed one is no more; who is left of it takes the next place."""
    whole = churned(tmp_path / "a", [{"at": 0.1, "join": 2}, {"at": 0.75, "kill": 1}])
    cut = gone_back(whole, tmp_path / "cut", 12)
    ready = prepare(cut, 5)
    assert ready.config.world.workers == 5 and ready.config.pipeline.ravnest.clusters == ((1,), (1,))
    summary = train(ready.config, cut, resume=12)
    assert summary["val_loss"] == summary["val_loss_replicas"] and summary["replicas"] == 2
    assert Checkpoints(cut).read_shard(16, 4)["server"] is None


def test_a_loss_between_shard_and_commit_keeps_the_checkpoint(tmp_path: Path) -> None:
    """Killed at any of these moments: whatever exists can be gone on from."""
    for number, at in enumerate((0.62, 0.655, 0.66, 0.67, 0.7)):
        out = churned(tmp_path / str(number), [{"at": 0.1, "join": 2}, {"at": at, "kill": 2}], "run.steps=12")
        there = Checkpoints(out).steps()
        assert there and there[0] == 4
        cut = gone_back(out, tmp_path / f"cut-{number}", there[-1])
        ready = prepare(cut, None)
        assert train(ready.config, cut, resume=ready.step)["val_loss"] is not None


def test_the_command_goes_on_and_refuses_other_numbers(tmp_path: Path) -> None:
    out = churned(tmp_path / "a", EVENTS)
    cut = gone_back(out, tmp_path / "cut", 12)
    before = (cut / "config.toml").read_text()
    for option, word in (("--workers", "--workers 3: after step 12 6 were left"), ("--stages", "--stages 3: clusters")):
        code, _, error = isles("resume", str(cut), option, "3", folder=tmp_path)
        assert code == 2 and word in error and "\n" not in error.strip()
    assert (cut / "config.toml").read_text() == before
    code, _, error = isles("resume", str(cut), folder=tmp_path)
    assert code == 0, error
    assert "going on with the 6 workers that were left after step 12, in 3 clusters" in error
    assert json.loads((cut / "summary.json").read_text())["workers"] == 6
