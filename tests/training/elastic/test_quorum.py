"""Rounds for whose mean a quorum is enough, on real processes: one that is slow, and one that is killed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.training.elastic.processes import Processes
from tests.training.elastic.test_runs import events
from tests.training.elastic.warm import Worker

FAST, SLOW = 0.4, 1.4  # seconds that a round takes, at the least


def landed(world: Processes) -> list[dict[str, Any]]:
    """Words on rounds that land, in their order."""
    decisions = [event["decision"] for event in events(world.out, "decision")]
    return [decision for decision in decisions if decision["outcome"] == "land"]


def member(worker: Worker) -> int:
    return worker.rounds()[-1]["member"]


@pytest.mark.long
def test_the_slow_one_delays_nobody_and_the_killed_one_leaves_nobody_stuck(tmp_path: Path) -> None:
    """The others land without the slow one, whose work is in the mean of a later round. Digests agree all along."""
    settings = ["replicas.method=diloco", "replicas.on_late=quorum", "replicas.quorum=0.6"]
    world = Processes(tmp_path, *settings, founders=4)
    try:
        fast, slow = [world.warm_join(pause=FAST) for _ in range(3)], world.warm_join(pause=SLOW)
        world.until(lambda: all(len(one.landings()) >= 12 for one in (*fast, slow)))
        late, before = member(slow), landed(world)
        without = [decision for decision in before if late not in decision["members"]]
        assert len(without) >= len(before) / 3 and len(before) - len(without) >= 2
        steps = {
            decision["round"]: dict(zip(decision["members"], decision["steps"], strict=True)) for decision in before
        }
        carried = [steps[decision["round"] + 1].get(late, 0) for decision in without if decision["round"] + 1 in steps]
        assert any(carried)  # what was late for one round is in the next one
        killed = fast.pop()
        lost = member(killed)
        killed.kill()
        living = [*fast, slow]
        reached = max(max(one.landings()) for one in living)
        world.until(lambda: all(max(one.landings()) >= reached + 12 for one in living))
        assert all(lost not in decision["members"] for decision in landed(world) if decision["round"] > reached + 6)
        digests: dict[int, set[int]] = {}
        for one in (*living, killed):
            for round, digest in one.landings().items():
                digests.setdefault(round, set()).add(digest)
        assert sorted(digests) == list(range(1, max(digests) + 1)) and all(len(each) == 1 for each in digests.values())
        assert all(sorted(one.landings()) == list(range(1, max(one.landings()) + 1)) for one in living)
        for one in living:
            one.send_signal(signal.SIGTERM)
        assert [one.wait(60.0) for one in living] == [0] * 3, world.logs()
        world.light.send_signal(signal.SIGINT)
        assert world.light.wait(60.0) == 130 and "Traceback" not in world.logs()
        print(f"{len(without)} of {len(before)} rounds without the slow one; {len(digests)} in all")
    finally:
        world.end()
