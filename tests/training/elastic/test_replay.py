"""A run done again from its record: the same weights, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from isles.membership.run_log import RoundRecord, StartRecord
from isles.network.churn import ChurnEvent
from isles.training.elastic.metrics import recorded
from isles.training.elastic.replay import repeat, replay_log
from tests.training.elastic.processes import Processes
from tests.training.elastic.test_runs import EVERY
from tests.training.elastic.test_simulated import EVERYTHING, churned, small
from tests.training.elastic.warm import Worker

EVENTS = int(os.environ.get("ISLES_REPLAY", "20"))
FIRST, APART, LAST = 8, 4, 12  # rounds before the first event, between two, and after the last
MOST, PAUSE = 5, 0.15  # workers at once; seconds that each sleeps in a round
GONE_OVER = {(0, 4), (1, 4), (1, 5), (0, 5)}
CHANGES = [ChurnEvent(30.0, "join", 2), ChurnEvent(65.0, "kill", 1), ChurnEvent(150.0, "leave", 0)]


def is_the_same(one: Path, two: Path) -> bool:
    first, second = load_file(one), load_file(two)
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def test_pairs_through_everything(tmp_path: Path) -> None:
    """Also what ended by a deadline here and was whole there, and shares of those who died before they told of it."""
    run = churned(small(tmp_path, 4, 24), EVERYTHING, tmp_path)
    assert run.summary["outcomes"].keys() - {"whole", "alone"}
    members = repeat(run.config, run.out, tmp_path / "again.safetensors", lambda notice: None)
    assert members == sorted(run.results) and is_the_same(run.out / "model.safetensors", tmp_path / "again.safetensors")


@pytest.mark.long
def test_one_mean_for_all(tmp_path: Path) -> None:
    run = churned(small(tmp_path, 4, 40, every=4, method="diloco"), CHANGES, tmp_path)
    repeat(run.config, run.out, tmp_path / "again.safetensors", lambda notice: None)
    assert is_the_same(run.out / "model.safetensors", tmp_path / "again.safetensors")


def test_who_has_a_state_that_nobody_else_has_begins_as_drawn(tmp_path: Path) -> None:
    """All members die while a joiner waits for its first round with the state that one of them gave it."""
    trace = [ChurnEvent(65.0, "join", 1), *(ChurnEvent(85.0, "kill", member) for member in range(2))]
    run = churned(small(tmp_path, 2, 24, method="diloco"), trace, tmp_path)
    starts = [record for record in recorded(run.out)[1] if isinstance(record, StartRecord) and record.member == 2]
    assert [(record.donor, record.has) for record in starts] == [(-1, 0)] and run.simulation.counts["deaths"] == 2
    repeat(run.config, run.out, tmp_path / "again.safetensors", lambda notice: None)
    assert is_the_same(run.out / "model.safetensors", tmp_path / "again.safetensors")


def test_rounds_that_a_worker_went_over_are_gone_over(tmp_path: Path) -> None:
    run = churned(small(tmp_path, 2, 16), [], tmp_path)
    (run.out / "exchanges.jsonl").write_text(
        "".join(
            f"{json.dumps(record)}\n"
            for record in run.records
            if (record["member"], record.get("round")) not in GONE_OVER
        )
    )
    members = repeat(run.config, run.out, tmp_path / "again.safetensors", lambda notice: None)
    assert members == [0, 1] and not is_the_same(run.out / "model.safetensors", tmp_path / "again.safetensors")


def record(member: int, round: int, outcome: str = "whole", members: tuple[int, ...] = (0, 1)) -> RoundRecord:
    return RoundRecord(
        member=member,
        round=round,
        view=0,
        spare=0,
        steps=2,
        seconds=1.0,
        members=members,
        outcome=outcome,
        at=float(round),
    )


def start(member: int, donor: int = -1, has: int = 0) -> StartRecord:
    return StartRecord(member=member, first=has + 1, donor=donor, copied=has, has=has, size=0, at=0.0)


def test_what_only_others_tell_of_is_done_too() -> None:
    made = replay_log([], [start(0), start(1), record(0, 1), record(1, 1), record(0, 2)], agrees=False)
    ghost = made.record(1, 2)
    assert ghost is not None and (ghost.outcome, ghost.members) == ("PeerLost", (0, 1))


@pytest.mark.parametrize(
    ("records", "agrees", "named"),
    [
        ([start(0, -1, 4)], False, "began with a state from the lighthouse's disk"),
        ([start(0), record(0, 1, "alone", (0,)), record(0, 1)], True, "did not land round 1 in time"),
        ([start(0), record(0, 3)], False, "nothing is on record of worker 1 in round 3"),
    ],
)
def test_what_cannot_be_repeated_is_said(records: list, agrees: bool, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replay_log([], records, agrees=agrees)


def change(world: Processes, living: list[Worker], draw: random.Random) -> None:
    """One kills, asks to leave or joins. Whoever goes leaves two behind who have the state."""
    settled = [worker for worker in living if len(worker.rounds()) > 3]
    if len(settled) < 3 or (len(living) < MOST and draw.random() < 0.5):
        living.append(world.warm_join(pause=PAUSE))
        return
    victim = draw.choice(settled)
    living.remove(victim)
    victim.send_signal(draw.choice([signal.SIGKILL, signal.SIGTERM]))


@pytest.mark.long
@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_processes_that_were_killed_and_joined(tmp_path: Path, method: str) -> None:
    """A real run with deaths, leaves and joins, and what `isles simulate RUN --replay` makes of its record."""
    rounds = FIRST + EVENTS * APART + LAST
    world = Processes(tmp_path, f"replicas.method={method}", founders=3, steps=rounds * EVERY)
    draw = random.Random(5)
    try:
        living = [world.warm_join(pause=PAUSE) for _ in range(3)]
        for event in range(EVENTS):
            world.until(lambda: furthest(world) >= FIRST + event * APART)  # noqa: B023
            change(world, living, draw)
        world.until(lambda: (world.out / "summary.json").exists(), 200.0)
        print(json.loads((world.out / "summary.json").read_text())["outcomes"])
    finally:
        world.end()
    command = [sys.executable, "-m", "isles", "simulate", str(world.out), "--replay", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    told = json.loads(done.stdout)
    assert told["same"] and told["workers"]


def furthest(world: Processes) -> int:
    """The newest round that somebody has done."""
    return max((one["round"] for worker in world.warm for one in worker.rounds()[-1:]), default=0)
