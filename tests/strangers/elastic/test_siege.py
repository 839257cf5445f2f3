"""A run of real processes under everything in `cases`, and under hundreds of connections: it trains on."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from isles.base.version import __version__
from isles.comm.credentials import read
from tests.strangers.callers import GARBAGE, call
from tests.strangers.elastic.attacker import Attacker
from tests.strangers.elastic.cases import CASES
from tests.training.elastic.processes import Processes
from tests.training.elastic.test_runs import events
from tests.training.elastic.warm import Worker

MOST = 32 << 20  # bytes that a process may grow by


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Processes]:
    """Two workers that train in rounds of some tenths of a second."""
    made = Processes(tmp_path, "run.log_every=5")
    try:
        pair = [made.warm_join(), made.warm_join()]
        made.until(lambda: min(len(one.rounds()) for one in pair) > 30)
        yield made
    finally:
        made.end()


def longest_gap(workers: list[Worker], began: float) -> tuple[float, float]:
    """(longest time between two rounds since then, their median before)."""
    usual = statistics.median(gap for one in workers for gap in one.gaps(end=began))
    return max(gap for one in workers for gap in one.gaps(began - 1.0)), usual


@pytest.mark.long
def test_everything_at_once(world: Processes, tmp_path: Path) -> None:
    pair = list(world.warm)
    before = {pid: _memory(pid) for pid in (world.light.pid, *(one.pid for one in pair))}
    corpus = events(world.out, "join")[0]["description"]
    token = read(world.out / "credentials").token
    attacker = Attacker(world.address, token, tmp_path / "attacker", version=__version__, corpus=corpus, victim=0)
    began, most = time.monotonic(), dict.fromkeys(before, 0)
    try:
        for case in CASES:
            case.do(attacker)
            most = {pid: max(grown, _memory(pid) - before[pid]) for pid, grown in most.items()}
        reached = [len(one.rounds()) for one in pair]
        world.until(lambda: all(len(one.rounds()) > r + 10 for one, r in zip(pair, reached, strict=True)))
    finally:
        attacker.close()
    gap, usual = longest_gap(pair, began)
    print(f"{len(CASES)} cases: gap {gap:.2f} s, median {usual:.2f} s, grown by {[g >> 20 for g in most.values()]} MB")
    assert gap <= usual + 2.0 and max(most.values()) <= MOST
    said = (world.folder / "0.log").read_text()
    own = f"worker {attacker.entry.member}"
    for case in CASES:
        by = {"lighthouse": "the lighthouse", "victim": "worker 0"}.get(case.by, "")
        if case.reason:
            assert f"{by} refuses {own if case.member == 'own' else 'somebody'}: {case.reason}" in said, case.name
    assert "Traceback" not in said


@pytest.mark.long
@pytest.mark.parametrize("kind", ["silent", "failing"])
def test_hundreds_of_connections(world: Processes, kind: str) -> None:
    """300: running workers feel nothing, and who joins gets in within a minute of their end."""
    pair, port = list(world.warm), int(world.address.rpartition(":")[2])
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        for number in range(300):
            said = b"" if kind == "silent" else list(GARBAGE.values())[number % len(GARBAGE)]
            with contextlib.suppress(OSError):
                line = call(port, said)
                if kind == "silent":
                    stack.enter_context(contextlib.closing(line))
                else:
                    line.shutdown(socket.SHUT_RDWR)
                    line.close()
        time.sleep(10.0 if kind == "silent" else 0.0)
    ended = time.monotonic()
    joiner = world.warm_join()
    world.until(lambda: any(one["outcome"] == "whole" for one in joiner.rounds()), seconds=90.0)
    took = time.monotonic() - ended
    gap, usual = longest_gap(pair, began)
    print(f"300 {kind} connections: gap {gap:.2f} s, median {usual:.2f} s; a join took {took:.1f} s")
    assert gap <= usual + 2.0 and took <= 60.0
    assert json.loads((world.out / "metrics.jsonl").read_text().splitlines()[-1])["step"] > 0


def _memory(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
