"""What `isles train --dry-run` says of a swarm, against the run itself on the virtual clock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isles.cli.plan_printer import show
from isles.plan.peers import plan_swarm
from isles.plan.record import RunPlan
from tests.training.swarm.test_swarm import config, train

SLOW = (
    "world.virtual.links=lan",
    "world.virtual.step_factors=[1,1,1,4,1,1,1]",
    "data.batch_size=96",
    "pipeline.microbatches=48",
)
SETTINGS = {
    "alike": ("world.virtual.links=home-fibre", "world.virtual.step_seconds=2"),
    "slow": ("world.virtual.step_seconds=5", *SLOW),
    "strict": ("world.virtual.step_seconds=5", "pipeline.swarm.consistency=strict", *SLOW),
    "uneven": (
        "world.virtual.links=home-fibre",
        "world.virtual.step_seconds=10",
        "world.virtual.step_factors=[1,2,1,1,1,1,3]",
        "data.batch_size=48",
        "pipeline.microbatches=24",
    ),
    "one a stage": (
        "world.virtual.links=home-fibre",
        "world.virtual.step_seconds=20",
        "pipeline.swarm.peers=[1,2,1]",
        "world.workers=4",
        "data.batch_size=24",
        "pipeline.microbatches=12",
    ),
}


def measured(folder: Path, *more: str) -> tuple[float, float]:
    """Bytes of all peers and seconds, a step: of four steps behind the third."""
    found = []
    for steps in (3, 7):
        summary, _ = train(config(*more, f"run.steps={steps}", "run.validate_every=0"), folder / str(steps))
        found.append((summary["bytes_sent_per_worker"] * summary["workers"], summary["virtual_seconds"]))
    (early, began), (late, ended) = found
    return (late - early) / 4, (ended - began) / 4


def check(name: str, folder: Path) -> RunPlan:
    planned = plan_swarm(config(*SETTINGS[name]))
    nbytes, seconds = measured(folder, *SETTINGS[name])
    assert planned.swarm_bytes == pytest.approx(nbytes, abs=0.5)
    assert sum(peer.step_bytes or 0 for peer in planned.workers) == pytest.approx(nbytes, rel=1e-4)
    assert planned.time.step == pytest.approx(seconds, rel=0.10)
    return planned


def test_bytes_are_exact_and_seconds_near(tmp_path: Path) -> None:
    planned = check("one a stage", tmp_path)
    assert [round(peer.microbatches or 0) for peer in planned.workers][::3] == [12, 12]


@pytest.mark.long
@pytest.mark.parametrize("name", ["alike", "slow", "strict", "uneven"])
def test_whatever_peers_there_are(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


def test_it_is_printed_and_told_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    show(config(*SETTINGS["alike"]), probe=False, as_json=False)
    text = capsys.readouterr().out
    assert "a swarm of 3 stages" in text and "of the clock" in text and "slowest stage can do" in text
    show(config("world.backend=distributed"), probe=False, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["time"] is None and len(told["workers"]) == 7
    assert min(worker["memory"]["peak_bytes"] for worker in told["workers"]) > 0
