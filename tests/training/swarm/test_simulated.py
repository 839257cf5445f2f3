"""Swarms on the virtual clock whose peers die, come and leave: the weights of one process, and nobody hangs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from isles.training.simulated_churn import SimulatedSwarm
from tests.cli.command import isles
from tests.training.swarm.test_swarm import SWARM, alone, config, furthest, train

__all__ = ["alone"]


def write(path: Path, events: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(event) + "\n" for event in sorted(events, key=lambda event: event["at"])))
    return str(path)


EVENTS = [
    {"at": 0.15, "kill": 3},
    {"at": 0.25, "join": 1},
    {"at": 0.5, "leave": 6},
    {"at": 0.6, "join": 2},
    {"at": 0.9, "kill": 0},
    {"at": 1.3, "leave": 7},
]


def run(folder: Path, events: list[dict[str, Any]], *more: str) -> tuple[SimulatedSwarm, dict[str, Any], Any]:
    folder.mkdir(exist_ok=True)
    trace = write(folder / "trace.jsonl", events)
    swarm = SimulatedSwarm(config(*more), trace, folder / "run", lambda line: None, lambda notice: None)
    summary = swarm.run()
    return swarm, summary, load_file(str(folder / "run" / "model.safetensors"))


def test_who_comes_and_goes_changes_nothing(alone: Any, tmp_path: Path) -> None:
    swarm, summary, weights = run(tmp_path / "a", EVENTS)
    assert furthest(weights, alone[1]) < 1e-12
    assert summary["val_loss"] == pytest.approx(alone[0]["val_loss"], abs=1e-12)
    assert summary["tokens"] == alone[0]["tokens"]
    assert {key: summary[key] for key in ("joins", "deaths", "leaves")} == {"joins": 3, "deaths": 2, "leaves": 2}
    assert sorted(swarm.results) == [1, 2, 4, 5, 8, 9] and 0 < summary["compute_utilisation"] < 1


@pytest.mark.long
def test_the_same_again(tmp_path: Path) -> None:
    (_, first, ours), (_, second, theirs) = (run(tmp_path / name, EVENTS) for name in "ab")
    assert furthest(ours, theirs) == 0 and first["virtual_seconds"] == second["virtual_seconds"]


@pytest.mark.long
def test_the_command_takes_a_trace(tmp_path: Path) -> None:
    sets = [word for each in SWARM if "backend" not in each for word in ("--set", each)]
    (tmp_path / "plain.toml").write_text("")
    trace = write(tmp_path / "trace.jsonl", EVENTS)
    code, out, error = isles("simulate", "plain.toml", "--churn", trace, "--json", *sets, folder=tmp_path)
    assert code == 0, error
    assert "worker 7 joins stage" in error and "joins" in out
    assert "worker 3 of stage 1 was lost by step" in error


def test_a_trace_with_a_lighthouse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a run of swarm has no lighthouse"):
        run(tmp_path / "a", [{"at": 1.0, "lighthouse": 3}])


def test_what_a_swarm_on_the_virtual_clock_would_ignore(tmp_path: Path) -> None:
    """Who stands still is waited for however long the lease is."""
    with pytest.raises(
        ValueError, match=r"world.elastic.lease = 9.0 does not go with --churn .* a paused one is waited for"
    ):
        run(tmp_path / "a", [], "world.elastic.lease=9")


def soak(steps: int, every: float, seed: int, kinds: tuple[str, ...], least: int = 6) -> list[dict[str, Any]]:
    """Every so many seconds somebody who is there goes, or a new one comes; `least` to 4 more are there."""
    drawn, here, events, latest = random.Random(seed), list(range(least + 1)), [], least + 1
    for number in range(1, steps):
        if len(here) <= least or (len(here) < least + 4 and drawn.random() < 0.5):
            events.append({"at": number * every, "join": 1})
            here.append(latest)
            latest += 1
        else:
            gone = here.pop(drawn.randrange(len(here)))
            events.append({"at": number * every, drawn.choice(kinds): gone})
    return events


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("steps", [200, 1000])
def test_soak(tmp_path: Path, steps: int) -> None:
    """About every 10 steps a peer is killed or joins."""
    more = (f"run.steps={steps}", "run.validate_every=250", "run.log_every=100", "world.virtual.links=lan")
    single, _ = train(config(*more, "pipeline.swarm.peers=[1,1,1]", "world.workers=3"), tmp_path / "one")
    more = (
        *more,
        "pipeline.swarm.rebalance=throughput",
        "pipeline.swarm.rebalance_every=0.2",
        "pipeline.swarm.hysteresis=0.05",
    )
    more = (*more, "pipeline.swarm.peers=[4,4,4]", "world.workers=12")
    _, summary, _ = run(tmp_path / "many", soak(steps // 10, 0.33, 3, ("kill",), least=11), *more)
    print(summary["joins"], summary["deaths"], summary["virtual_seconds"])
    assert abs(summary["val_loss"] - single["val_loss"]) < 1e-9
    assert summary["deaths"] > steps // 25


@pytest.mark.long
def test_a_hundred_that_leave_lose_nothing(alone: Any, tmp_path: Path) -> None:
    more = ("run.steps=200", "run.validate_every=0", "run.log_every=100", "world.virtual.links=lan")
    single, expected = train(config(*more, "pipeline.swarm.peers=[1,1,1]", "world.workers=3"), tmp_path / "one")
    events = soak(230, 0.03, 5, ("leave",))
    swarm, summary, weights = run(tmp_path / "many", events, *more)
    print(summary["leaves"], summary["virtual_seconds"])
    assert summary["leaves"] >= 100 and summary["tokens"] == single["tokens"]
    assert furthest(weights, expected) < 1e-9
    again = [each.model_step.swarm.peer.counts for each in swarm.workers.values()]
    assert sum(each.repaired + each.restarted + each.sent_again for each in again) == 0


@pytest.mark.long
def test_relaxed_ends_near_the_undisturbed_run(tmp_path: Path) -> None:
    """A peer killed in each stage, 200 steps."""
    more = ("run.steps=200", "run.validate_every=0", "run.log_every=100", "world.virtual.links=lan", "inner.lr=0.01")
    well, _ = train(config(*more), tmp_path / "well")
    events = [{"at": 0.5, "kill": 0}, {"at": 1.1, "kill": 3}, {"at": 1.7, "kill": 6}]
    _, summary, _ = run(tmp_path / "killed", events, *more, "pipeline.swarm.consistency=relaxed")
    print(well["val_loss"], summary["val_loss"], summary["deaths"])
    assert summary["deaths"] == 3 and abs(well["val_loss"] - summary["val_loss"]) < 0.05
