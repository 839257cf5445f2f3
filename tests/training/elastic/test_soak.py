"""Real processes that are killed, frozen, told to leave and joined, at random moments: 20 times in `make test-long`,
a thousand times in `make soak`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from isles.comm.elastic.record import ALONE
from isles.training.config.sections import LEASE
from tests.training.elastic.processes import Processes, connected, held
from tests.training.elastic.test_runs import events

pytest.importorskip("zenoh")
EVENTS = int(os.environ.get("ISLES_SOAK", "20"))
LEAST, MOST = (5, 8) if EVENTS > 20 else (2, 4)
SETTLED = 50  # events after which what the lighthouse holds may grow by a fifth at most
FROZEN = 5.0  # seconds; whoever waits for one that stands still does so for its whole patience
WHAT = ["kill", "kill", "kill", "leave", "freeze", "join", "join", "join", "join"]


@pytest.mark.long
@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_a_run_outlives_its_workers(tmp_path: Path, method: str) -> None:
    """No hang, no traceback, no orphan; in the end the last view is the living, and they train."""
    draw, world = random.Random(7), Processes(tmp_path, f"replicas.method={method}", founders=LEAST)
    try:
        living = [world.warm_join() for _ in range(LEAST)]
        world.until(lambda: events(world.out, "view"))
        settled, frozen = (0, 0), list[float]()
        for event in range(EVENTS):
            if event == SETTLED:
                settled = held(world.light)
            time.sleep(draw.uniform(0.5, 2.0))
            what = draw.choice(WHAT)
            if (what == "join" and len(living) < MOST) or len(living) <= LEAST:
                living.append(world.warm_join())
                continue
            victim = draw.choice(living)
            if what == "freeze":
                victim.send_signal(signal.SIGSTOP)
                frozen.append(time.monotonic())
                time.sleep(FROZEN)
                victim.send_signal(signal.SIGCONT)
                continue
            living.remove(victim)
            victim.send_signal(signal.SIGKILL if what == "kill" else signal.SIGTERM)
            if what == "leave":
                assert victim.wait(60.0) in (0, 143, -15), world.logs()  # 143, -15: it was not in yet
        world.until(lambda: len(connected(world.out)) == len(living))
        wanted = connected(world.out)
        world.until(lambda: set(events(world.out, "view")[-1]["view"]["seats"]) == wanted)
        lines = (world.out / "metrics.jsonl").read_text().count("\n")
        world.until(lambda: (world.out / "metrics.jsonl").read_text().count("\n") > lines + 10)
        assert all(process.poll() is None for process in living), world.logs()
        now = held(world.light)
        for process in living:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(60.0) for process in living] == [0] * len(living), world.logs()
        world.light.send_signal(signal.SIGINT)
        assert world.light.wait(60.0) == 130
        assert all(process.poll() is not None for process in world.warm)
        assert "Traceback" not in world.logs()
        assert os.path.getsize(world.out / "members.jsonl") < EVENTS << 17
        outcomes = Counter(one["outcome"] for process in world.warm for one in process.rounds())
        exchanges = sum(outcomes.values()) - outcomes[ALONE]
        late = [one["at"] for process in world.warm for one in process.rounds() if one["outcome"] == "DeadlinePassed"]
        late = [at for at in late if not any(start <= at <= start + FROZEN + LEASE for start in frozen)]
        gaps = sorted(gap for process in world.warm for gap in process.gaps())
        print(f"{method}: {EVENTS} events, {dict(outcomes)}, {len(late)} late while nobody stood still")
        print(f"between two rounds {gaps[len(gaps) // 2]:.2f} s, at most {gaps[-1]:.1f} s; the lighthouse's pages and "
              f"files {settled} -> {now}")  # fmt: skip
        for after, before in zip(now, settled, strict=True):
            assert before == 0 or after <= 1.2 * before
        assert EVENTS < SETTLED or len(late) <= 0.01 * exchanges
    finally:
        world.end()


def steps_of(out: Path, seats: set[int]) -> list[int]:
    """Steps of the lines of metrics of these seats, in the order in which they came."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["worker"] in seats and "loss" in line]


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
