"""Workers as processes of their own that need not load torch: forked from one that has it.

Each does what `isles join` does, and writes a line for each of its rounds itself, so that a killed worker's last word
counts, and the time between two rounds can be told while the lighthouse is away.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

FOLDER = "rounds"
_LOADED = ["torch._dynamo", "isles.cli", "isles.training.elastic.entering", "tests.training.elastic.warm"]


class Worker:
    """One process, with as much of `subprocess.Popen` as tests of processes need. pause: seconds that it sleeps in each
    round, so that rounds take a while and the machine is left to others.
    """

    def __init__(self, words: Sequence[str], folder: Path, log: Path, pause: float = 0.0) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_LOADED)
        self._process: ForkServerProcess = context.Process(
            target=_work, args=(list(words), str(folder), str(log), pause)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._written = folder / FOLDER / f"{self.pid}.jsonl"

    def rounds(self) -> list[dict[str, Any]]:
        """Its lines so far; `at`: when the round ended, by the monotonic clock."""
        if not self._written.exists():
            return []
        text = self._written.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def gaps(self, start: float = 0.0, end: float = float("inf")) -> list[float]:
        """Seconds between the ends of two rounds, between two moments of the monotonic clock."""
        return [
            late - early for early, late in pairwise(one["at"] for one in self.rounds() if start <= one["at"] <= end)
        ]

    def grown(self, before: int) -> int:
        """Bytes of memory more than `before`."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") - before

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        """The exit code. TimeoutExpired."""
        self._process.join(seconds)
        code = self._process.exitcode
        if code is None:
            raise TimeoutExpired("isles join", seconds or 0.0)
        return code

    def send_signal(self, signal: int) -> None:
        """As `Popen`'s."""
        if self.poll() is None:
            os.kill(self.pid, signal)

    def kill(self) -> None:
        """As `Popen`'s."""
        self._process.kill()

    def terminate(self) -> None:
        """As `Popen`'s."""
        self._process.terminate()


def warm_up() -> None:
    """Have the process that others are forked from load what it must."""
    nothing = multiprocessing.get_context("forkserver")
    nothing.set_forkserver_preload(_LOADED)
    process = nothing.Process(target=_nothing)
    process.start()
    process.join(120.0)


def _nothing() -> None:
    pass


def _work(words: list[str], folder: str, log: str, pause: float) -> None:
    """In the new process."""
    os.chdir(folder)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(out, stream)
    from isles.training.elastic.joining import Participant

    place = Path(folder, FOLDER)
    place.mkdir(exist_ok=True)
    written = (place / f"{os.getpid()}.jsonl").open("a", buffering=1)
    one_round = Participant._round

    def noted(worker: Participant, round: int, every: int) -> bool:
        time.sleep(pause)
        landed = bool(one_round(worker, round, every))
        seats, outcome = worker.roster.outcome(round)
        line = {"seat": worker.company.seat, "round": round, "seats": seats, "outcome": outcome, "landed": landed}
        line["digest"] = worker.optimizer.fragments[0].digest
        written.write(json.dumps({**line, "at": time.monotonic()}) + "\n")
        return landed

    Participant._round = noted  # type: ignore[method-assign]
    sys.argv = ["isles", *words]
    from isles.cli import main

    main()
