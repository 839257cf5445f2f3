"""Elastic runs of real processes: the commands of a lighthouse and its workers, here or on machines of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from benchmarks._machines import Machine
from isles.comm.credentials import read
from isles.comm.tcp import written
from isles.training.config.reading import to_toml
from tests.membership.sessions import free_port
from tests.training.elastic.runs import Run
from tests.training.elastic.test_runs import small
from tests.training.elastic.warm import Worker

FOUNDERS = 2
TELLING = """
import atexit, sys
from isles import cli
atexit.register(lambda: print("loaded:", *sorted({"torch"} & sys.modules.keys())))
cli.main()
"""
"""`isles`, which says at its end what it has loaded."""


class Processes:
    """A lighthouse and its workers as commands, each with a log in `folder`. host: the lighthouse's; on: what goes
    before a command so that it runs on that machine.
    """

    def __init__(
        self,
        folder: Path,
        *settings: str,
        founders: int = FOUNDERS,
        steps: int = 60_000,
        host: str = "127.0.0.1",
        on: Sequence[str] = (),
    ) -> None:
        self.folder, self.out = folder, folder / "run"
        port = str(free_port())
        self.address = written(host, int(port))
        config = small(folder, steps, founders, "inner.lr=0.001", *settings)
        (folder / "config.toml").write_text(to_toml(config))
        self.started: list[subprocess.Popen[bytes] | Worker] = []
        self.warm: list[Worker] = []
        words = ["lighthouse", str(folder / "config.toml"), "--host", host, "--port", port, "--out", str(self.out)]
        self.light: subprocess.Popen[bytes] | Worker = self._begin([*on, sys.executable, "-c", TELLING, *words])
        self.until(lambda: (self.out / "config.toml").exists())
        token = folder / "token"
        token.write_text(str(read(self.out / "credentials").token))
        self.token = f"@{token}"

    @property
    def _text(self) -> str:
        """Where `small` puts it."""
        return str(self.folder / "text.txt")

    def start(self, *words: str, on: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        return self._begin([*on, sys.executable, "-m", "isles", *words])

    def _begin(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{len(self.started)}.log").open("wb") as log:
            process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
        self.started.append(process)
        return process

    def light_again(self) -> None:
        """The lighthouse that has ended goes on, as a process that need not load torch; others can join."""
        words, log = ["resume", str(self.out), "--workers", "0"], self.folder / f"{len(self.started)}.log"
        self.light = Worker(words, self.folder, log)
        self.started.append(self.light)
        self.until(lambda: log.exists() and "to join" in log.read_text())

    def join(self, *more: str, on: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        return self.start("join", self.address, "--token", self.token, "--data", self._text, *more, on=on)

    def warm_join(
        self, *more: str, pause: float = 0.25, on: Machine | None = None, scratch: Path | None = None
    ) -> Worker:
        """A worker that need not load torch; each of its rounds takes `pause` seconds and some. See `Worker`."""
        log = self.folder / f"warm-{len(self.warm)}.log"
        words = ["join", self.address, "--token", self.token, "--data", self._text, *more]
        self.warm.append(Worker(words, self.folder, log, pause, on=on, scratch=scratch))
        return self.warm[-1]

    def until(self, over: Callable[[], object], seconds: float = 90.0) -> None:
        ends = time.monotonic() + seconds
        while not over():
            assert time.monotonic() < ends, self.logs()
            time.sleep(0.05)

    def put_out(self) -> None:
        """End the lighthouse as Ctrl-C does."""
        self.light.send_signal(signal.SIGINT)
        assert self.light.wait(60.0) == 130

    def logs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-600:]}" for path in sorted(self.folder.glob("*.log")))

    def end(self) -> None:
        for process in (*self.started, *self.warm):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


class NearbyLighthouse(Processes):
    """The same with a lighthouse in a thread of this process, which is there at once."""

    def __init__(self, folder: Path, *settings: str, founders: int = FOUNDERS, steps: int = 60_000) -> None:
        self.folder, self.out = folder, folder / "run"
        self.started, self.warm = [], []
        self._run = Run(small(folder, steps, founders, "inner.lr=0.001", *settings), self.out)
        self.address = self._run.address
        token = folder / "token"
        token.write_text(self._run.token)
        self.token = f"@{token}"

    def put_out(self) -> None:
        self._run.stop()

    def end(self) -> None:
        super().end()
        self._run.stop()


def held(process: subprocess.Popen[bytes] | Worker) -> tuple[int, int]:
    """(pages of memory, open files)."""
    own = Path(f"/proc/{process.pid}")
    return int((own / "statm").read_text().split()[1]), len(list((own / "fd").iterdir()))


def connected(out: Path) -> set[int]:
    """Seats that are there, as the journal has it."""
    there: set[int] = set()
    for line in (out / "members.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["event"] in ("join", "back"):
            there.add(entry["member"])
        elif entry["event"] == "lost":
            there.discard(entry["member"])
    return there


class Diary:
    """When each line of a run's metrics and journal came, seen from beside it."""

    def __init__(self, out: Path) -> None:
        self.rounds: dict[int, list[float]] = {}  # by member: when its lines came
        self.events: list[tuple[float, dict[str, Any]]] = []
        self._out, self._over = out, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def when(self, event: str, member: int, since: float) -> float | None:
        """When the journal had it."""
        found = (at for at, e in list(self.events) if e["event"] == event and e.get("member") == member and at >= since)
        return next(found, None)

    def gaps(self, members: Sequence[int], start: float, end: float) -> list[float]:
        """Seconds between two rounds of one of `members`."""
        times = [[at for at in self.rounds.get(member, []) if start <= at <= end] for member in members]
        return [late - early for one in times for early, late in pairwise(one)]

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        with (self._out / "metrics.jsonl").open() as metrics, (self._out / "members.jsonl").open() as members:
            while not self._over.wait(0.02):
                now = time.monotonic()
                for line in _whole(metrics):
                    if "loss" in line:
                        self.rounds.setdefault(line["worker"], []).append(now)
                self.events += [(now, line) for line in _whole(members)]


def _whole(file: TextIO) -> list[dict[str, Any]]:
    """The lines that are there now, but for one that is half there."""
    place, text = file.tell(), file.read()
    whole = text.rfind("\n") + 1
    file.seek(place + len(text[:whole].encode()))
    return [json.loads(line) for line in text[:whole].splitlines()]
