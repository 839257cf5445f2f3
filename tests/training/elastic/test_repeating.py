"""A run done again from its record: the same weights, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from isles.comm.elastic.record import RoundLine, StartLine
from isles.network.churn import ChurnEvent
from isles.training.elastic.repeating import repeat
from isles.training.elastic.script import script
from tests.training.elastic.processes import Processes
from tests.training.elastic.test_churned import EVERYTHING, churned, small
from tests.training.elastic.test_late import late

CHANGES = [ChurnEvent(30.0, "join", 2), ChurnEvent(65.0, "kill", 1), ChurnEvent(150.0, "leave", 0)]


def is_the_same(one: Path, two: Path) -> bool:
    first, second = load_file(one), load_file(two)
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


def test_pairs_through_everything(tmp_path: Path) -> None:
    """Also what ended by a deadline here and was whole there, and shares of those who died before they told of it."""
    run = churned(small(tmp_path, 4, 24), EVERYTHING, tmp_path)
    assert run.summary["outcomes"].keys() - {"whole", "alone"}
    seats = repeat(run.config, run.out, tmp_path / "again.safetensors", lambda notice: None)
    assert seats == sorted(run.results) and is_the_same(run.out / "model.safetensors", tmp_path / "again.safetensors")


@pytest.mark.long
def test_one_mean_for_all(tmp_path: Path) -> None:
    config = late(tmp_path, 4, 40)
    config = replace(config, replicas=replace(config.replicas, on_late="wait"))
    run = churned(config, CHANGES, tmp_path)
    repeat(run.config, run.out, tmp_path / "again.safetensors", lambda notice: None)
    assert is_the_same(run.out / "model.safetensors", tmp_path / "again.safetensors")


def line(seat: int, round: int, outcome: str = "whole", seats: tuple[int, ...] = (0, 1)) -> RoundLine:
    return RoundLine(
        seat=seat, round=round, view=0, spare=0, steps=2, seconds=1.0, seats=seats, outcome=outcome, at=float(round)
    )


def start(seat: int, donor: int = -1, has: int = 0) -> StartLine:
    return StartLine(seat=seat, first=has + 1, donor=donor, copied=has, has=has, size=0, at=0.0)


def test_what_only_others_tell_of_is_done_too() -> None:
    made = script([], [start(0), start(1), line(0, 1), line(1, 1), line(0, 2)], agrees=False)
    ghost = made.line(1, 2)
    assert ghost is not None and (ghost.outcome, ghost.seats) == ("PeerLost", (0, 1))


@pytest.mark.parametrize(
    ("lines", "agrees", "named"),
    [
        ([start(0, -1, 4)], False, "began with a state from the lighthouse's disk"),
        ([start(0), line(0, 1, "alone", (0,)), line(0, 1)], True, "did not land round 1 in time"),
        ([start(0), line(0, 3)], False, "nothing is on record of worker 1 in round 3"),
    ],
)
def test_what_cannot_be_repeated_is_said(lines: list, agrees: bool, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        script([], lines, agrees=agrees)


@pytest.mark.long
@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_processes_that_were_killed_and_joined(tmp_path: Path, method: str) -> None:
    """A real run with deaths, leaves and joins, and what `isles simulate RUN --replay` makes of its record."""
    pytest.importorskip("zenoh")
    draw, world = random.Random(5), Processes(tmp_path, f"replicas.method={method}", steps=4000)
    try:
        living = [world.join(), world.join(), world.join()]
        world.until(lambda: (world.out / "exchanges.jsonl").read_text().count("\n") > 30)
        for _ in range(int(os.environ.get("ISLES_REPLAY", "6"))):
            time.sleep(draw.uniform(0.5, 2.0))
            if len(living) > 2 and draw.random() < 0.5:
                victim = living.pop(draw.randrange(len(living)))
                victim.send_signal(draw.choice([signal.SIGKILL, signal.SIGTERM]))
            else:
                living.append(world.join())
        world.until(lambda: (world.out / "summary.json").exists(), 400.0)
    finally:
        world.end()
    command = [sys.executable, "-m", "isles", "simulate", str(world.out), "--replay", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    told = json.loads(done.stdout)
    assert told["same"] and told["workers"]
