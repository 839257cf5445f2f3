"""Nodes of clusters that stand still: short pauses are waited for, after `world.elastic.lease` the others go on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.training.clusters.changing import Watched, config

LONG = pytest.mark.long


def run_through(folder: Path, events: list[dict[str, Any]], *more: str) -> tuple[Watched, dict[str, Any]]:
    """A run to its end, all of whose clusters agree there."""
    run = Watched(config("run.validate_every=0", *more), folder, events)
    with pytest.MonkeyPatch.context() as patched:
        run.watch(patched)
        summary = run.run()
    run.check()
    return run, dict(summary)


def still(number: int, at: float, seconds: float | None) -> list[dict[str, Any]]:
    """Worker `number` stands still, for good without `seconds`."""
    return [{"at": at, "pause": number}, *([] if seconds is None else [{"at": at + seconds, "resume": number}])]


@pytest.mark.parametrize("seconds", [500.0, pytest.param(None, marks=LONG), pytest.param(1e6, marks=LONG)])
def test_the_others_go_on_without_one_that_stands_still(tmp_path: Path, seconds: float | None) -> None:
    """Its cluster is out, and the run is over long before it goes on."""
    run, summary = run_through(tmp_path, still(1, 0.2, seconds), "run.steps=8")
    assert summary["deaths"] == 1 and summary["replicas"] == 1 and summary["virtual_seconds"] < 10
    assert sorted(run.results) == [0, 2, 3]


@LONG
def test_a_short_pause_is_waited_for_and_changes_no_bit(tmp_path: Path) -> None:
    made = []
    for name, events in (("a", []), ("b", still(1, 0.2, 2.9)), ("c", still(3, 0.33, 2.0) + still(0, 2.4, 2.0))):
        run, summary = run_through(tmp_path / name, events)
        assert summary["deaths"] == 0 and (summary["virtual_seconds"] > 3) == bool(events)
        made.append(load_file(str(run.out / "model.safetensors")))
    assert all(torch.equal(made[0][name], other[name]) for other in made[1:] for name in made[0])


@LONG
def test_who_goes_on_comes_again_and_takes_its_place(tmp_path: Path) -> None:
    """As worker 4, since nobody else came; the trace's later word is about it."""
    events = [*still(1, 0.5, 4.0), {"at": 7.0, "leave": 1}]
    run, summary = run_through(tmp_path, events, "run.steps=120")
    assert any("worker 4 serves stage 1 of cluster 0" in descriptor for descriptor in run.told_notices)
    assert run.workers[4].agreement.has_departed and summary["replicas"] == 1 and summary["leaves"] == 1


@LONG
@pytest.mark.parametrize("moment", [0.05, 0.2, 0.3, 0.33, 0.34, 0.35, 0.38, 0.42, 0.6])
@pytest.mark.parametrize("number", [0, 4, 5])
def test_who_stands_still_while_others_come(tmp_path: Path, number: int, moment: float) -> None:
    """At any moment of it: who comes, who is there, in an average, in a load."""
    events = sorted([{"at": 0.02, "join": 2}, *still(number, moment, 100.0)], key=lambda event: event["at"])
    _, summary = run_through(tmp_path, events, "run.steps=12")
    assert summary["virtual_seconds"] < 20 and summary["replicas"] >= 1


@LONG
@pytest.mark.parametrize("seed", range(6))
def test_a_soak_of_pauses(tmp_path: Path, seed: int) -> None:
    """Six nodes, 150 steps: one of two clusters stands still every second or so, for moments or for long."""
    draw, events, busy = random.Random(seed), [], [0.0] * 6
    for turn in range(1, 16):
        number, at = draw.randrange(2, 6), 0.8 * turn + draw.uniform(0, 0.5)
        seconds = draw.choice([0.5, 2.5, 5.0])
        if busy[number] < at:
            events += still(number, at, seconds)
            busy[number] = at + seconds + 3.5
    more = ("run.steps=150", "run.log_every=50", "pipeline.ravnest.clusters=[[2],[1],[3]]", "world.workers=6")
    _, summary = run_through(tmp_path, sorted(events, key=lambda event: event["at"]), *more)
    assert summary["deaths"] > 0 and summary["val_loss"] is not None
