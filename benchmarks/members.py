"""What many members cost their lighthouse: light ones, with the real session and line to it, that compute nothing.

    python -m benchmarks.members [--members 64,256] [--processes 2] [--round 4] [--json]

A lighthouse in a process of its own (its limit of joins from one address lifted) waits for all as founders. Told: until
all have joined, round trips of their beats, what a view change takes once all train (one leaves: from the first
proposal of it until the last member has the view), processor time and memory of the lighthouse. Round trips hold what
the members' own processes wait for a core.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil

from benchmarks._measure import Row, report
from isles.base.version import __version__
from isles.comm.credentials import parse_token
from isles.membership.client import MembershipClient
from isles.membership.keys import HELLO
from isles.membership.messages import Beat, Entry, Hello, Load, Proposal, decode, encode
from isles.membership.tls_session import open_session

LIGHT = "import isles.membership.lighthouse as one; one.JOINS = 1 << 20; from isles.cli import main; main()"
SETTINGS = ["data.path=isles", "run.steps=1000000", "replicas.sync_every=10", "world.elastic.lease=20"]
PATIENCE = 120.0
SETTLED = 10.0  # seconds of which the beats and the lighthouse's processor time are told


class Watched(MembershipClient):
    """A line that notes when views were proposed and told, and how long each beat took."""

    def __init__(self, session: Any, entry: Entry, noted: dict[str, Any]) -> None:
        self.noted, self.has = noted, set[int]()
        super().__init__(session, entry)

    def _take_in(self, message: Any) -> Any:
        if isinstance(message, Proposal):
            self.noted["proposed"].setdefault(str(message.number), []).append(time.monotonic())
        answer = super()._take_in(message)
        self.look()
        return answer

    def look(self) -> None:
        """Note the views that are new here."""
        for number in self.state.views.keys() - self.has:
            self.has.add(number)
            self.noted["told"].setdefault(str(number), []).append(time.monotonic())

    def send(
        self, message: Any, answered: Callable[[Any], None] = lambda answer: None, *more: Any, **named: Any
    ) -> None:
        began = time.monotonic()

        def noting(answer: Any) -> None:
            if isinstance(message, Beat):
                self.noted["beats"].append(time.monotonic() - began)
            answered(answer)
            self.look()

        super().send(message, noting, *more, **named)


def serve(address: str, token: str, count: int, round_seconds: float) -> None:
    """So many members in this process. Each line of standard input is answered with what was noted; with "leave" one
    goes first.
    """
    lines: list[Watched] = []
    noted: dict[str, Any] = {"proposed": {}, "told": {}, "beats": []}

    def work() -> None:
        session = open_session(parse_token(token), address, PATIENCE)
        entry = None
        while not isinstance(entry, Entry):
            hello = Hello(__version__, "0" * 64, session.name(), (secrets.token_hex(16),))
            reply, _ = session.answer(HELLO, encode(hello), seconds=30.0)
            entry = None if reply is None else decode(reply)
        session.present(f"isles/member/{entry.member}")
        line = Watched(session, entry, noted)
        lines.append(line)
        while line.ended is None:
            if not isinstance(load := line.next_decision(5.0), Load):
                continue
            line.loaded(load, 0, {})
            round = line.first(PATIENCE)
            while round is not None and not line.is_over:
                line.start_round(round)
                time.sleep(round_seconds)
                round += 1

    threading.stack_size(1 << 18)
    for _ in range(count):
        threading.Thread(target=work, daemon=True).start()
    for said in sys.stdin:
        if said.strip() == "leave":
            lines[-1].leave()
        print(json.dumps({**noted, "joined": len(lines)}), flush=True)
        noted["beats"] = []
    os._exit(0)


@contextmanager
def lit(count: int, folder: Path) -> Iterator[tuple[psutil.Process, str, str]]:
    """The process of a lighthouse, its address and token."""
    log = folder / "lighthouse.log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = [word for one in SETTINGS for word in ("--set", one)]
    words = [
        "lighthouse",
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--founders",
        str(count),
        "--max-members",
        "1024",
    ]
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", LIGHT, *words, *settings, "--out", str(folder / "run")], stdout=out, stderr=out
        )
    try:
        ends, found = time.monotonic() + PATIENCE, None
        while found is None:
            if time.monotonic() > ends or process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.2)
            found = re.search(r"join (\S+) --token (\S+)", " ".join(log.read_text().split()))
        yield psutil.Process(process.pid), found[1], found[2]
    finally:
        process.kill()
        process.wait()


def measured(count: int, processes: int, round_seconds: float) -> list[Row]:
    """The figures of so many members."""
    with tempfile.TemporaryDirectory() as name, lit(count, Path(name)) as (lighthouse, address, token):
        idle = lighthouse.memory_info().rss
        began = time.monotonic()
        words = [sys.executable, "-m", "benchmarks.members", "--serve", address, token]
        each = [[*words, str(count // processes), str(round_seconds)] for _ in range(processes)]
        pipe = subprocess.PIPE
        members = [subprocess.Popen(one, stdin=pipe, stdout=pipe, text=True) for one in each]

        def ask(word: str = "", who: int = processes) -> list[dict[str, Any]]:
            for member in members[:who]:
                member.stdin.write(f"{word}\n")  # type: ignore[union-attr]
                member.stdin.flush()  # type: ignore[union-attr]
            return [json.loads(member.stdout.readline()) for member in members[:who]]  # type: ignore[union-attr]

        def until(over: Callable[[], bool]) -> float:
            while not over():
                if time.monotonic() - began > PATIENCE:
                    raise SystemExit(f"{count} members: not within {PATIENCE:g} s")
                time.sleep(0.1)
            return time.monotonic() - began

        try:
            joined = until(lambda: sum(one["joined"] for one in ask()) == count)
            until(lambda: sum(len(times) for one in ask() for times in one["told"].values()) >= count)
            time.sleep(2 * round_seconds)
            ask()
            before = sum(lighthouse.cpu_times()[:2])
            time.sleep(SETTLED)
            cpu, beats = sum(lighthouse.cpu_times()[:2]) - before, [one for told in ask() for one in told["beats"]]
            known = {number for one in ask() for number in one["told"]}
            ask("leave", 1)

            def views() -> dict[str, tuple[float, list[float]]]:
                told: dict[str, tuple[float, list[float]]] = {}
                for one in ask():
                    for number, times in one["told"].items():
                        first = min(one["proposed"].get(number, [times[0]]))
                        begun, all_times = told.get(number, (first, []))
                        told[number] = min(begun, first), all_times + times
                return {number: found for number, found in told.items() if number not in known}

            until(lambda: any(len(times) >= count - 1 for _, times in views().values()))
            changes = [max(times) - first for first, times in views().values() if len(times) >= count - 1]
            memory = lighthouse.memory_info().rss
        finally:
            for member in members:
                member.kill()
                member.wait()
    at = f"{count} members: "
    return [
        Row(f"{at}all have joined", joined, "s"),
        Row(f"{at}a beat's round trip, median", 1000 * median(beats), "ms"),
        Row(f"{at}99 of 100 beats are back within", 1000 * quantiles(beats, n=100)[98], "ms"),
        Row(f"{at}a view change, until the last member has it", min(changes), "s"),
        Row(f"{at}of a core, while they beat", cpu / SETTLED, ""),
        Row(f"{at}memory of the lighthouse", memory / 1e6, "MB", note=f"{idle / 1e6:.0f} MB before"),
    ]


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", default="64,256")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--round", type=float, default=4.0, help="seconds of a round")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = [row for count in given.members.split(",") for row in measured(int(count), given.processes, given.round)]
    return report(rows, given.json)


if __name__ == "__main__":
    sys.exit(main())
