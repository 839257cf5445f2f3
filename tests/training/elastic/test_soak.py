"""Real processes that are killed, frozen, told to leave and joined, at random moments: 10 times in `make test`; with a
lighthouse that is killed and frozen and disks that fill up once each in `make test-long`, and 60 times in `make soak`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.training.elastic.disks import Disk, unavailable
from tests.training.elastic.processes import NearbyLighthouse, Processes, held
from tests.training.elastic.recovery import Trouble, false_losses, recoveries, table
from tests.training.elastic.soaking import CALM, LIGHTHOUSE, ROOM, Soak, longest_gaps

EACH = int(os.environ.get("ISLES_SOAK", "1"))  # events of a kind, over both methods
SETTLED = 50  # events after which what the lighthouse holds may grow by a fifth at most


def test_a_run_outlives_ten(tmp_path: Path) -> None:
    """No hang, no traceback, no orphan; in the end the last view is the living; every batch was read, and every message
    received, or there is what ended it.
    """
    world = NearbyLighthouse(tmp_path, founders=3, steps=5_000)
    try:
        soak = Soak(world, 3, 5, (0.1, 0.3), pause=0.1)
        for _ in range(10):
            soak.event(CALM)
        soak.settle()
        soak.end()
        print(soak.exchanges(), soak.batches(agrees=False), soak.messages(), sep="\n")
    finally:
        world.end()


def test_whose_loss_is_false_and_who_is_whole_again_when() -> None:
    troubles = [
        Trouble("join", "a", 0.0, 0.0),
        Trouble("freeze", "b", 10.0, 14.0),
        Trouble("kill", "c", 20.0, 20.0),
        Trouble("lighthouse frozen", "", 30.0, 34.0),
    ]
    numbers = {0: "a", 1: "b", 2: "c"}
    losses = [(1, 13.5), (1, 18.9), (1, 19.1), (2, 20.1), (0, 31.0), (9, 32.0)]
    entries = [{"event": "lost", "member": member, "at": at} for member, at in losses]
    assert false_losses(entries, numbers, troubles) == [(19.1, "b"), (31.0, "a")]
    whole = {"a": [1.0, 15.0, 21.0, 34.5], "b": [2.0, 15.5, 26.0, 36.0], "c": [3.0, 15.0]}
    assert recoveries(troubles, whole) == {
        "join": [1.0],
        "freeze": [1.5],
        "kill": [6.0],
        "lighthouse frozen": [2.0],  # c does not come back
    }


@pytest.mark.long
@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_a_run_outlives_all_troubles(tmp_path: Path, method: str) -> None:
    """The same, with workers that freeze, a lighthouse that is killed and frozen, disks that fill up: nobody is lost to
    whom nothing was done, what the lighthouse holds stays as it is, and few exchanges end by deadline.
    """
    each = max(EACH // 2, 1)
    least, most = (5, 8) if each > 2 else (3, 5)
    reason = unavailable()
    disks = None if reason else {tmp_path / "run": Disk(tmp_path / "run", ROOM)}
    world = Processes(tmp_path, f"replicas.method={method}", founders=least)
    try:
        soak, settled = Soak(world, least, most, (0.4, 1.2), disks=disks), (0, 0)
        for event in soak.events(each):
            if event == SETTLED:
                soak.fill()
                settled = held(world.light)
        soak.fill()
        now = held(world.light)
        soak.end()
        (did, late), (usual, longest) = soak.exchanges(), longest_gaps(world.warm)
        took, lost = soak.recovered()
        print(f"{method}: {dict(soak.done)} {reason}; with others {dict(did)}; {late} ended by deadline")
        print(f"between two rounds {usual:.2f} s, at most {longest:.1f} s; false losses: {lost}")
        print(table(soak.troubles, took))
        print(f"the lighthouse's pages and files {settled} -> {now}")
        print(soak.batches(agrees=method == "diloco"))
        print(soak.messages())
        assert not lost
        assert os.path.getsize(world.out / "members.jsonl") < sum(soak.done.values()) << 17
        if settled != (0, 0):
            assert now[0] <= 1.2 * settled[0]
            assert now[1] <= 1.2 * settled[1]
            # beside 1 %, one for each time that the lighthouse was away: an exchange without a decision ends so
            assert late <= 0.01 * did.total() + sum(soak.done[kind] for kind in LIGHTHOUSE)
    finally:
        world.end()
        for disk in (disks or {}).values():
            disk.end()


def steps_of(out: Path, members: set[int]) -> list[int]:
    """Steps of the lines of metrics of these members, in the order in which they came."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["worker"] in members and "loss" in line]


def kill(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.long
def test_everybody_is_killed(tmp_path: Path) -> None:
    """All workers at once, then all and the lighthouse: whoever comes next goes on from a state at most
    `run.checkpoint_every` old.
    """
    every, slack = 200, 4 * 5  # a view begins three rounds ahead
    world = Processes(tmp_path, f"run.checkpoint_every={every}")
    try:
        killed = [world.join(), world.join()]
        world.until(lambda: max(steps_of(world.out, {0, 1}), default=0) > 3 * every)
        kill(*killed)
        reached = max(steps_of(world.out, {0, 1}))
        killed = [world.join(), world.join()]
        world.until(lambda: len(steps_of(world.out, {2, 3})) > 2)
        assert reached - every - slack <= steps_of(world.out, {2, 3})[0] <= reached + slack
        world.until(lambda: max(steps_of(world.out, {2, 3})) > reached + 2 * every)
        kill(world.light, *killed)
        reached = max(steps_of(world.out, {2, 3}))
        world.light = world.start("resume", str(world.out), "--workers", "2")
        world.until(lambda: len(steps_of(world.out, {4, 5})) > 2)
        assert reached - every - slack <= steps_of(world.out, {4, 5})[0] <= reached + slack
        world.light.send_signal(signal.SIGINT)
        assert world.light.wait(60.0) == 130
        assert "Traceback" not in world.logs()
    finally:
        world.end()
