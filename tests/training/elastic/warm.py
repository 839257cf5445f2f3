"""Workers as processes of their own that need not load torch: forked from one that has it.

Each does what `isles join` does, and writes a line for each of its rounds itself, so that a killed worker's last word
counts, and the time between two rounds can be told while the lighthouse is away. What it reads it notes in a mapped
file.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, TextIO

import numpy as np

from benchmarks._machines import Machine
from tests.forked import settle
from tests.training.elastic.mapped import FOLDER as MESSAGES
from tests.training.elastic.mapped import Book, book_of

FOLDER, LANDINGS, READS, STARTS = "rounds", "landings", "reads", "starts"
_MOST_READS = 1 << 20
_LOADED = ["torch._dynamo", "isles.cli", "isles.training.elastic.connect", "tests.training.elastic.warm"]


class Worker:
    """One process, with as much of `subprocess.Popen` as tests of processes need. pause: seconds that it sleeps in each
    round, among its inner steps, so that rounds take a while and the machine is left to others. on: the machine that it
    runs on, if not this one. scratch: where it keeps its temporary files.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        log: Path,
        pause: float = 0.0,
        *,
        on: Machine | None = None,
        scratch: Path | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_LOADED)
        self._process: ForkServerProcess = context.Process(
            target=_work,
            args=(list(words), str(folder), str(log), pause, on, scratch),  # which is known by its log: pids come again
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._folder, self.name = folder, log.stem

    def rounds(self) -> list[dict[str, Any]]:
        """Its lines so far; `at`: when the round ended, by the monotonic clock."""
        return self._lines(FOLDER)

    def landings(self) -> dict[int, int]:
        """The hash of its anchor after each landing of a mean for which a quorum was enough, by round."""
        return {line["round"]: line["digest"] for line in self._lines(LANDINGS)}

    def starts(self) -> list[dict[str, Any]]:
        """A `StartRecord` for each state that it began with."""
        return self._lines(STARTS)

    def reads(self) -> list[tuple[int, int]]:
        """(round, number in the data's order) of each batch that it has begun to read in turn."""
        written = self._folder / READS / self.name
        if not written.exists():
            return []
        if written.stat().st_size < 8:
            return []
        told = np.fromfile(written, np.int64, count=1 + int(np.fromfile(written, np.int64, count=1)[0]))
        return [(number >> 32, number & (1 << 32) - 1) for number in told[1 : 1 + told[0]].tolist()]

    def book(self) -> np.ndarray:
        """Its messages and exchanges, see `mapped`."""
        return book_of(self._folder / MESSAGES / self.name)

    def _lines(self, kind: str) -> list[dict[str, Any]]:
        written = self._folder / kind / f"{self.name}.jsonl"
        if not written.exists():
            return []
        text = written.read_text()
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

    def is_there(self) -> bool:
        """Whether a process of its number, that is this one, is there."""
        try:
            return Path(f"/proc/{self.pid}/cwd").resolve() == self._folder.resolve()
        except OSError:
            return False

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


def _work(words: list[str], folder: str, log: str, pause: float, on: Machine | None, scratch: Path | None) -> None:
    """In the new process."""
    if on is not None:
        on.go()
    if scratch is not None:
        tempfile.tempdir = str(scratch)
    settle(folder)  # Isles starts the server with SIGTERM blocked, where a test before this one needed it first
    name = Path(log).stem
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(out, stream)
    from isles.data.order import rows
    from isles.membership.client import MembershipClient
    from isles.membership.rounds import Decision
    from isles.training.elastic.leader import Participant
    from isles.training.elastic.worker import Decisions, ElasticWorker
    from isles.training.trainer import Trainer

    rounds, landings, starts = (_file(Path(folder, kind), name) for kind in (FOLDER, LANDINGS, STARTS))
    Path(folder, READS).mkdir(exist_ok=True)
    Book(Path(folder, MESSAGES, name)).attach()
    reads = np.memmap(Path(folder, READS, name), np.int64, "w+", shape=(1 + _MOST_READS,))
    one_round, one_step, one_landing, train = Participant._round, Trainer.step, Participant._landed, ElasticWorker.train
    report, now = MembershipClient.report, [0]  # the round under way

    def reading(worker: ElasticWorker, said: Decision) -> None:
        for batch in said.slices:
            reads[reads[0] + 1] = now[0] << 32 | int(rows(*batch, batch_size=1)[0])
            reads[0] += 1
        train(worker, said)

    def slowly(trainer: Trainer) -> None:
        time.sleep(pause / trainer.config.replicas.sync_every)
        one_step(trainer)

    def reported(client: MembershipClient, event: Any) -> None:
        if "start" in event:
            starts.write(json.dumps(event["start"]) + "\n")
        report(client, event)

    def noted(worker: Participant, round: int, every: int) -> Decisions[int]:
        now[0] = round
        over = yield from one_round(worker, round, every)
        members, outcome = worker.leader.outcome(round)
        line = {
            "member": worker.client.member,
            "round": round,
            "members": members,
            "outcome": outcome,
            "landed": over > 0,
        }
        line["digest"] = worker.optimizer.fragments[0].digest
        rounds.write(json.dumps({**line, "at": time.monotonic()}) + "\n")
        return over

    def landed(worker: Participant, round: int) -> None:
        landings.write(json.dumps({"round": round, "digest": worker.optimizer.fragments[0].digest}) + "\n")
        one_landing(worker, round)

    Participant._round, Participant._landed = noted, landed  # type: ignore[method-assign]
    MembershipClient.report = reported  # type: ignore[method-assign]
    Trainer.step, ElasticWorker.train = slowly, reading  # type: ignore[method-assign]
    sys.argv = ["isles", *words]
    from isles.cli import main

    main()


def _file(folder: Path, name: str) -> TextIO:
    folder.mkdir(exist_ok=True)
    return (folder / f"{name}.jsonl").open("a", buffering=1)
