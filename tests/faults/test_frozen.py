"""Workers that are stopped and never continued: whoever waits for them ends, in a stated time, and says who it was."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from isles.comm.errors import CommError, WorkerFailed
from isles.comm.sockets import connection as silences
from isles.comm.transport import Deadlines
from isles.launch import workers as launching
from isles.launch.workers import LocalWorkers
from tests.faults import workers

WAITS = Deadlines(join=6.0, silence=5.0)
LATER = 30.0  # seconds beyond the silence: 5 that are stated, and a busy machine that starts eighteen processes


def frozen(moment: str, goes_on: bool) -> tuple[list[Any], float, LocalWorkers]:
    """Results of three workers, worker 1 being stopped then, and how long they took. goes_on: as `return_errors`."""
    pool = LocalWorkers(workers.meets, 3, args=(moment,), deadlines=WAITS)
    start = time.monotonic()
    if moment == "joining":
        assert pool.processes[1].pid is not None
        os.kill(pool.processes[1].pid, signal.SIGSTOP)
    results = pool.join(on_failure=(lambda rank, error: None) if goes_on else None)
    return results, time.monotonic() - start, pool


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_frozen_worker_is_named_at_every_moment(turn: int) -> None:
    """While all join, in a collective, at the end; whether the others are ended or go on to their own end, in turn."""
    cases = [(moment, place % 2 == turn) for place, moment in enumerate(("in a round", "joining", "at the end"))]
    with ThreadPoolExecutor(len(cases)) as at_once:
        outcomes = list(at_once.map(lambda case: frozen(*case), cases))
    for (moment, goes_on), (results, seconds, pool) in zip(cases, outcomes, strict=True):
        assert isinstance(results[1], WorkerFailed), (moment, results)
        assert "its process is stopped or its machine frozen" in str(results[1]), (moment, results)
        assert seconds < WAITS.join + LATER, (moment, goes_on, seconds)
        assert all(process.exitcode is not None for process in pool.processes)
        if moment == "at the end":
            assert [results[0], results[2]] == [0, 2]
        else:
            assert all(isinstance(results[rank], CommError) for rank in (0, 2)), (moment, results)


def test_workers_that_never_meet_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are alive and wait for one that does not exist."""
    specs = launching.worker_specs
    monkeypatch.setattr(
        launching, "worker_specs", lambda *a, **k: [replace(spec, size=spec.size + 1) for spec in specs(*a, **k)]
    )
    pool = LocalWorkers(workers.meets, 2, args=("never",), deadlines=replace(WAITS, join=2.0))
    results = pool.join()
    assert [type(result) for result in results] == [WorkerFailed, WorkerFailed]
    assert "it has not met the other workers within 2 s: raise world.join_deadline" in str(results[0])


class Heard:
    """A handle to a worker that has not met the others; it has given signs of life, or none."""

    lost = False

    def __init__(self, rank: int, is_alive: bool) -> None:
        self.ranks: tuple[int, ...] = (rank,)
        self.is_alive = is_alive
        self._ours, self._theirs = socket.socketpair()

    def fileno(self) -> int:
        return self._ours.fileno()

    def read(self) -> list[Any]:
        return [(self.ranks[0], "beat", 0)] if self.is_alive else []

    def tell(self, command: Any) -> None:
        pass


def test_who_never_gave_a_sign_is_the_cause() -> None:
    """Not those who wait for it, though all come to the end of join_deadline in one moment."""
    handles = [Heard(0, True), Heard(1, True), Heard(2, False)]
    pool = launching.Workers(3, handles, lambda patience: None, replace(WAITS, join=0.3))
    results = pool.join()
    assert str(results[2]) == "worker 2 failed: no sign of life for 0.3 s: its process is stopped or its machine frozen"
    assert all("for worker 2 is lost" in str(results[rank]) for rank in (0, 1)), results
    assert pool.failures[0] == 2


@pytest.mark.parametrize(
    "struck_by", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)], ids=["KILL", "STOP"]
)
def test_a_worker_lost_in_the_last_collective_takes_nobody_along(struck_by: signal.Signals) -> None:
    """`solo`: the others finish, with one model among them, whichever of the last collectives it was."""

    def run(moment: str) -> list[Any]:
        pool = LocalWorkers(workers.ends_solo, 3, args=(moment, int(struck_by)), deadlines=replace(WAITS, join=60.0))
        return pool.join(on_failure=lambda rank, error: None)

    with ThreadPoolExecutor(2) as at_once:
        for results in at_once.map(run, ("spread", "consolidate")):
            assert isinstance(results[1], WorkerFailed)
            first, last = results[0], results[2]
            assert first == last, results  # to the bit
            assert first[2] == 2


def test_who_stood_still_itself_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z, a closed lid, a busy machine: only the time counts in which one has looked."""
    clock = [0.0]
    monkeypatch.setattr(silences.time, "monotonic", lambda: clock[0])
    silence = silences.Silence(60.0, first=300.0)

    def after(seconds: float, looks: int) -> bool:
        over = False
        for _ in range(looks):
            clock[0] += seconds / looks
            over = silence.over()
        return over

    assert not after(299.0, 1000) and after(2.0, 10), "until the first word, five minutes"
    silence.heard()
    assert not after(59.0, 200), "still below the limit"
    silence.heard()
    assert not after(100_000.0, 1), "this side stood still for a day"
    assert not after(55.0, 200) and after(5.0, 20)
    assert not silences.Silence(60.0).over()
