"""Deadlines and lost workers over real processes: who is told, what, within which time, and who is left in peace.

The limits are those of the guarantees: a deadline is reported within one second of its end, a killed process within two
seconds. A machine that is busy with other things makes workers slow, so pairs that "go on" are only asked to answer
often, and without the failed worker's seconds.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

import isles
from isles.comm.errors import DeadlinePassed, WorkerFailed
from isles.comm.transport import Deadlines
from isles.launch import workers as local
from isles.launch.workers import LocalWorkers
from tests.comm import failure_workers
from tests.gloo import run_gloo

SOON = Deadlines(control=20.0, outer=20.0)
DEADLINE = 1.0


def went_on(connection_state: dict[str, Any], seconds: float) -> bool:
    """Many exchanges, and none that took as long as the failure next door."""
    count, gap = connection_state["pair"]
    return count >= 20 and gap < seconds


def test_a_silent_worker_is_named_when_the_deadline_ends() -> None:
    """Within deadline + 1 s, by whoever waits for it; another pair goes on exchanging, the late message is not taken
    for a new one, and the worker is welcome later. A transfer nobody waits for is over when its deadline is.
    """
    zero, one, two, three = run_gloo(failure_workers.silent, 4, args=(DEADLINE,), deadlines=SOON)
    kind, peer, seconds = zero["told"]
    assert (kind, peer) == ("DeadlinePassed", 3) and DEADLINE <= seconds < DEADLINE + 1.0, zero
    assert zero["over"] and zero["forgotten"][0] == "DeadlinePassed" and zero["forgotten"][2] < DEADLINE
    assert went_on(one, DEADLINE) and went_on(two, DEADLINE), (one, two)
    assert zero["later"] == 13.0 and three["later"] == 10.0 and three["told"][0] == ""


def test_a_killed_worker_is_named_within_two_seconds() -> None:
    """PeerLost on everyone who exchanges with it, again on the next try; the other pair and a group of the survivors
    go on; the launcher knows how it ended.
    """
    zero, one, two, three = isles.run_local(failure_workers.killed, 4, deadlines=SOON, return_errors=True)
    assert isinstance(three, WorkerFailed) and three.rank == 3 and "exit code -9" in three.report
    kind, peer, seconds = zero["told"]
    assert (kind, peer) == ("PeerLost", 3) and seconds < 0.5 + 2.0, zero
    assert zero["again"][:2] == ("PeerLost", 3) and zero["again"][2] < 2.0
    assert went_on(one, 1.5) and went_on(two, 1.5), (one, two)
    for connection_state in (zero, one, two):
        assert connection_state["mean"][:2] == ("PeerLost", 3) and connection_state["mean"][2] < 2.0, connection_state
        assert connection_state["survivors"] == [1.0]


@pytest.mark.long
def test_a_stopped_worker_is_named_when_the_deadline_ends() -> None:
    """A paused process keeps its connections: only the deadline tells. Continued, it is a member again, and the calls
    that failed meanwhile have not put the others out of step with it.
    """
    deadlines = Deadlines(control=2.0, outer=20.0)
    zero, one, two, three = run_gloo(failure_workers.stopped, 4, args=(DEADLINE,), deadlines=deadlines)
    kind, peer, seconds = zero["told"]
    assert (kind, peer) == ("DeadlinePassed", 3) and DEADLINE <= seconds < DEADLINE + 1.0, zero
    assert went_on(one, DEADLINE) and went_on(two, DEADLINE), (one, two)
    for connection_state in (zero, one, two):
        kind, peer, seconds = connection_state["everyone"]
        assert (kind, peer) == ("DeadlinePassed", 3) and 2.0 <= seconds < 3.0, connection_state
    assert three["late"] == 1.0, "0 had sent it before it gave up"
    assert zero["later"] == 13.0 and three["later"] == 10.0


def test_a_stopped_worker_does_not_hold_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the one that noticed is raised, and the stopped process is ended."""
    monkeypatch.setattr(local, "_GRACE", 0.3)
    pool = LocalWorkers(failure_workers.stopped_for_good, 2)
    start = time.monotonic()
    results = pool.join()
    assert time.monotonic() - start < 20.0  # it would stand still for ever
    assert isinstance(results[0], DeadlinePassed) and results[0].peer == 1
    assert isinstance(results[1], WorkerFailed) and "ended by the launcher" in str(results[1])
    assert pool.failures == [0, 1] and all(process.exitcode is not None for process in pool.processes)
    with pytest.raises(WorkerFailed, match="worker 1"):  # the paused one is the cause, not who noticed
        local.raise_first(results, pool.failures)


def test_a_receive_from_anyone_survives_a_dead_member() -> None:
    """Waiting for anyone does not fail because someone died; waiting for the dead one does."""
    zero, _, two = isles.run_local(failure_workers.deserted, 3, deadlines=SOON, return_errors=True)
    assert isinstance(two, WorkerFailed)
    assert zero["sender"] == zero["sent"] == 1 and zero["nothing more"][:2] == ("DeadlinePassed", -1)
    assert zero["dead"][:2] == ("PeerLost", 2) and zero["dead"][2] < 2.0


@pytest.mark.long
@pytest.mark.parametrize("runs", [5, pytest.param(20, marks=pytest.mark.long)])
def test_many_runs_exit_well(runs: int) -> None:
    """All four processes exit 0, so many times in a row, with receives and transfers given up."""
    for seed in range(runs):
        pool = LocalWorkers(failure_workers.everything, 4, args=(seed,), deadlines=SOON)
        start = time.monotonic()
        assert pool.join() == [seed + 1.5] * 4
        assert [process.exitcode for process in pool.processes] == [0] * 4
        assert time.monotonic() - start < 20.0
