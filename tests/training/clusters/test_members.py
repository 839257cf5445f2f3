"""Clusters over a lighthouse: founders fill them, who comes later takes a place or makes a new one."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isles.network.clusters import ClusterNode
from isles.training.clusters.member import ClusterParticipant
from isles.training.clusters.node import growth_of
from isles.training.lighthouse import schedule
from isles.training.lighthouse.peers import ClusterLighthouseServer
from tests.training.clusters.changing import FOUR
from tests.training.swarm.members import SwarmRun, elastic_config

LONG = pytest.mark.long
SEATED = [one for one in FOUR if "backend" not in one and "links" not in one]


class ClusterRun(SwarmRun):
    """Nodes have memory for half of the model."""

    keeps = ClusterLighthouseServer

    def __init__(self, out: Path, *more: str) -> None:
        made = elastic_config(*SEATED, *more)
        half = ClusterNode(name="", memory=0.95 * growth_of(made).load.least, speed=1e9, bandwidth=1e9)
        self.kind = partial(ClusterParticipant, node=half)
        super().__init__(made, out)


def assignment_of(run: ClusterRun, number: int) -> Any:
    peer: Any = run.peers[number]
    return peer._trainer._worker.agreement.assignment


def member(run: ClusterRun, number: int) -> int:
    return run.peers[number].client.member


@LONG
def test_founders_train_as_on_the_virtual_clock(tmp_path: Path) -> None:
    """The same weights, to the bit, as in a world of fixed size."""
    from tests.training.clusters.test_clusters import SETTINGS, config, train

    run = ClusterRun(tmp_path / "run")
    for _ in range(4):
        run.join()
    summary = run.end()
    train(config(*FOUR[len(SETTINGS) :]), tmp_path / "fixed")
    ours, theirs = (load_file(str(tmp_path / name / "model.safetensors")) for name in ("run", "fixed"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert summary["workers"] == 4 and summary["replicas"] == 2
    run.until(lambda: list(run.end_reasons.values()) == ["finished"] * 4)


@LONG
def test_who_comes_makes_a_cluster_takes_a_place_and_leaves(tmp_path: Path) -> None:
    """And a killed one's cluster is whole again with who comes after it."""
    run = ClusterRun(tmp_path / "run", "run.steps=600", "run.validate_every=0", "run.log_every=100")
    for _ in range(4):
        run.join()
    run.until(lambda: run.step(0) >= 8)
    pair = [run.join(), run.join()]
    run.until(lambda: len(assignment_of(run, 0).whole) == 3)
    assert assignment_of(run, 0).clusters[2] == tuple(sorted(member(run, number) for number in pair))
    run.vanish(1)
    run.until(lambda: len(assignment_of(run, 0).whole) == 2)
    last = run.join()
    run.until(lambda: len(assignment_of(run, 0).whole) == 3)
    assignment = assignment_of(run, 0)
    assert assignment.coordinates_of(member(run, last)) is not None and member(run, 1) in assignment.lost
    run.peers[pair[0]].leave()
    run.until(lambda: run.end_reasons.get(pair[0]) == "left")
    run.until(lambda: len(assignment_of(run, 0).whole) == 2)
    summary = run.end(300)
    assert summary["workers"] == 5 and summary["leaves"] == 1 and summary["deaths"] == 1
    assert (tmp_path / "run" / "model.safetensors").exists()


@LONG
@pytest.mark.parametrize("every", [20, "auto"])
def test_a_run_that_lost_all_goes_on_from_what_the_lighthouse_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: Any
) -> None:
    monkeypatch.setattr(schedule, "LEAST", 0.5)
    monkeypatch.setattr(schedule, "MOST", 0.5)
    monkeypatch.setattr(schedule, "_NOTICE", 1.0)
    run = ClusterRun(tmp_path / "run", "run.steps=200", "run.validate_every=0", f"run.checkpoint_every={every}")
    for _ in range(4):
        run.join()
    run.until(lambda: run.keeper.coordinator.saved >= 40)
    retained = run.keeper.coordinator.saved
    for number in range(4):
        run.vanish(number)
    run.until(lambda: not run.keeper.coordinator.alive())
    fresh = [run.join() for _ in range(4)]
    run.until(lambda: run.step(fresh[0]) > retained)
    assert run.keeper.coordinator.epoch == 2
    summary = run.end(300)
    (notice,) = [line for line in run.notices if "begins again" in line]
    assert notice.startswith("no complete cluster was left") and f", {summary['steps_lost']} steps lost" in notice
    assert summary["begun"] == 2 and all(run.end_reasons[number] == "finished" for number in fresh)


class Late(ClusterParticipant):
    """It is slow between being told whom to ask and asking."""

    asks = threading.Event()

    def made(self, part: Any) -> Any:
        if not self.asks.wait(60.0):
            raise TimeoutError
        return super().made(part)


@LONG
def test_who_asks_those_who_are_gone_asks_the_lighthouse_again(tmp_path: Path) -> None:
    """All whom it was to ask died before it could; it is of those with whom the run goes on."""
    more = ("run.steps=200", "run.validate_every=0", "run.checkpoint_every=20", "pipeline.ravnest.clusters=[[2]]")
    run = ClusterRun(tmp_path / "run", *more, "world.workers=2")
    first, plain = [run.join() for _ in range(2)], run.kind
    run.until(lambda: run.keeper.coordinator.saved >= 20)
    run.kind = partial(Late, *plain.args, **plain.keywords)
    late = run.join()
    run.until(lambda: late in run.peers and run.peers[late].client.member >= 2)
    time.sleep(1.0)  # it has been told to ask the first ones
    for number in first:
        run.vanish(number)
    run.until(lambda: not run.keeper.coordinator.alive())
    run.kind = plain
    Late.asks.set()
    fresh = run.join()
    run.until(lambda: run.step(fresh) > 0 and run.step(late) > 0, 60.0)
    assert run.keeper.coordinator.epoch == 2
    assert run.end(120)["begun"] == 2


@LONG
def test_a_joiner_tells_what_was_measured(tmp_path: Path) -> None:
    """Memory, speed and its line to the lighthouse, so that it makes a cluster of its own."""
    from isles.network.clusters import decode_node

    run = ClusterRun(tmp_path / "run", "run.steps=150", "run.validate_every=0")
    for _ in range(4):
        run.join()
    run.until(lambda: run.step(0) >= 8)
    run.kind = ClusterParticipant
    last = run.join()
    run.until(lambda: len(assignment_of(run, 0).whole) == 3)
    assignment = assignment_of(run, 0)
    node = decode_node(assignment.descriptors[member(run, last)], "")
    assert assignment.clusters[2] == (member(run, last),) and node is not None
    assert node.bandwidth != pytest.approx(run.config.world.slowest_link, rel=0.01) and 0 < node.latency < 1.0
    now = run.keeper.coordinator.now(0.0, [])
    assert {one.coordinates[2:] for one in now.members if one.member == member(run, last)} <= {
        (1, 1),
        (),
    }
    run.end(300)
