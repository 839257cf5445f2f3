"""A training thread that hangs while its process goes on: it says so, is left out, and comes back."""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from isles.comm.gloo.transfers import OnHostClock
from isles.comm.transport import Transport
from isles.membership.requests import LighthouseClient
from isles.training.elastic.stall import StallWatch
from tests.training.elastic.runs import Run
from tests.training.elastic.test_runs import small
from tests.training.swarm.members import SwarmRun, elastic_config
from tests.training.swarm.test_members import settings


def test_a_step_that_does_not_end_is_said_and_no_wait_for_others() -> None:
    """From the third step on, after 2 s; while the thread waits for others its counts grow."""
    told, reported = list[str](), list[Any]()
    client, stalls, end = SimpleNamespace(waited=0.0, report=reported.append), list[bool](), ExitStack()
    waits = OnHostClock()
    with end:
        watch = StallWatch(
            end, cast(LighthouseClient, client), [cast(Transport, waits)], 2.0, told.append, stalls.append
        )
        for _ in range(2):
            with watch.step():
                time.sleep(0.01)
        with watch.step():
            for _ in range(16):
                time.sleep(0.25)
                waits.liveness.glances += 1
            assert not told and not stalls
            until = time.monotonic() + 5.0
            while not stalls and time.monotonic() < until:
                time.sleep(0.05)
        assert stalls == [True] and re.match(
            "this worker has done no step for [23] s .a step usually takes 0.0", told[0]
        )
        time.sleep(1.5)
        assert stalls == [True, False] and told[1].startswith("this worker goes on after")
        assert reported == [{"notice": line} for line in told]


@pytest.mark.long(cases=2)
@pytest.mark.parametrize("many", [1, 3])
def test_who_hangs_is_lost_and_comes_back(tmp_path: Path, many: int) -> None:
    """One of three, or all at once: also where the others do not wait for it, as in pairs."""
    made = Run(small(tmp_path, 60_000, 3, "world.elastic.stall=3", "run.log_every=5"), tmp_path / "run")
    goes_on = threading.Event()

    def events(kind: str) -> set[int]:
        entries = map(json.loads, (tmp_path / "run" / "members.jsonl").read_text().splitlines())
        return {entry["member"] for entry in entries if entry["event"] == kind}

    try:
        for _ in range(3):
            made.join()
        made.until(lambda: len(made.workers) == 3 and min(w.optimizer.steps for w in made.workers.values()) > 30)
        hanging = [*made.workers.values()][:many]
        for worker in hanging:
            trainer = worker.trainer
            trainer.step = lambda step=trainer.step: goes_on.wait(120.0) and step()  # type: ignore[method-assign]
        wanted = {worker.client.member for worker in hanging}
        began = time.monotonic()
        made.until(lambda: events("lost") >= wanted)
        print(f"lost after {time.monotonic() - began:.1f} s")
        for member in wanted:
            assert any(f"worker {member}: this worker has done no step for" in line for line in made.notices)
        assert events("lost") == wanted
        goes_on.set()
        made.until(lambda: events("back") >= wanted)
        reached = {worker: worker.optimizer.steps for worker in hanging}
        made.until(lambda: all(worker.optimizer.steps > steps + 20 for worker, steps in reached.items()))
    finally:
        goes_on.set()
        made.stop()
        made.rest()


@pytest.mark.long
def test_a_peer_that_hangs_is_named_and_comes_back_as_another_member(tmp_path: Path) -> None:
    """Of two at a stage: the other one goes on, for the connections of the one that hangs break."""
    run = SwarmRun(elastic_config(*settings("[2,1]", 100_000, "world.elastic.stall=3")), tmp_path)
    goes_on = threading.Event()
    try:
        first, hanging, last = (run.join(stage) for stage in (0, 0, 1))
        run.until(lambda: run.step(hanging) > 5)
        trainer = cast(Any, run.peers[hanging]._trainer)
        member, compute = run.peers[hanging].client.member, trainer.optimizer.step
        trainer.optimizer.step = lambda *of, **by: goes_on.wait(60.0) and compute(*of, **by)
        run.until(lambda: any(f"worker {member}: this worker has done no step for" in line for line in run.notices))
        run.until(lambda: member not in run.keeper.coordinator.members)
        reached = run.step(first)
        run.until(lambda: run.step(first) > reached + 5 and run.step(last) > reached + 5)
        goes_on.set()
        run.until(lambda: run.peers[hanging].client.member != member and run.step(hanging) > reached)
    finally:
        goes_on.set()
        run.stop()
