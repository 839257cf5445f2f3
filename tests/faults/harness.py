"""Trials: a small run, a fault, a moment, a worker, a launcher; and whether it ended as `docs/guarantees.md` says.

    python -m tests.faults.harness 500                    # so many seeded trials; a line each, and the table
    python -m tests.faults.harness 500 --write            # and the table into docs/guarantees.md

A trial ends in one of three ways: the run finishes (what was hit healed, or `solo` went on without it); it fails with
one line that names the worker, and what it saved resumes to the bits of the run that nobody hit; or it stops in good
order (SIGTERM), and resumes likewise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isles.comm.errors import CommError
from isles.launch.nodes import NodeGroup, NodeSpec
from isles.launch.workers import LocalWorkers, Workers
from isles.training.config import sections
from isles.training.config.sections import Config
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.events import Schema
from isles.training.running import follow as following
from isles.training.running.run import Interrupted, launch
from isles.training.running.server import start_server
from isles.training.running.starting import deadlines
from tests.faults import striking
from tests.faults.striking import KINDS, MOMENTS, SIGNALS
from tests.integration.test_faults import workers as processes
from tests.training.runs import run, tiny, write_text

METHODS = ("none", "ddp", "diloco", "noloco", "solo", "streaming-diloco", "sparta", "ist", "dilocox", "demo")
LAUNCHERS = ("one machine", "two nodes")
WORKERS, STEPS = 3, 12
SILENCE, DEADLINE, JOIN, GRACE = 8.0, 3.0, 20.0, 10.0
_NAMED = {"KILL": 5.0, "SEGV": 5.0, "thread": 5.0, "NaN": 5.0, "disk": 5.0, "TERM": GRACE}
ENDS = {**_NAMED, **dict.fromkeys(("STOP", "length", "round"), max(SILENCE, DEADLINE) + 5.0)}
"""Seconds from the fault to the end of the run's trouble: until it has failed or stopped, by kind."""
_DOC = Path(__file__).resolve().parents[2] / "docs" / "guarantees.md"
_MARKS = "<!-- trials -->", "<!-- /trials -->"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One of them."""

    method: str
    kind: str
    moment: str
    worker: int = 1
    launcher: str = "one machine"

    def __str__(self) -> str:
        return f"{self.method}, {self.kind}, {self.moment}, worker {self.worker}, {self.launcher}"

    @property
    def limit(self) -> float:
        """Seconds within which its end is known."""
        return JOIN + 5.0 if self.moment == "join" else ENDS[self.kind]

    @property
    def fits(self) -> bool:
        """Whether there is such a thing: before it has joined a worker can only get signals, it writes no checkpoint of
        weights that are broken, and `none` sends nothing that could be spoilt.
        """
        if self.moment == "join":
            return self.kind in SIGNALS and self.launcher == "one machine"
        if self.kind == "disk":
            return self.moment in ("first round", "round", "checkpoint") or (self.moment, self.worker) == ("end", 0)
        if self.kind == "NaN":
            return self.moment != "checkpoint"  # between the look at what is saved and the saving
        if self.kind in ("length", "round"):
            return self.moment in ("first round", "round") and self.method != "none"
        return True


def drawn(seed: int) -> Trial:
    """The trial of a seed."""
    draw = random.Random(seed)
    while True:
        trial = Trial(
            method=draw.choice(METHODS),
            kind=draw.choice(KINDS),
            moment=draw.choice(MOMENTS),
            worker=draw.randrange(WORKERS),
            launcher=draw.choice(LAUNCHERS),
        )
        if trial.fits:
            return trial


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """end: "finished", "failed", "stopped". words: the line. seconds: from the fault until the end was known."""

    end: str
    words: str
    seconds: float
    wrong: str
    """What is not as it must be; empty where all is."""


class Bench:
    """Where trials are made: a folder, with the runs that nobody hit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._text = write_text(folder / "text.txt")
        self._whole: dict[str, bytes] = {}
        self._count = 0
        sections._LEAST_SILENCE = 1.0

    def config(self, method: str, *assignments: str) -> Config:
        """Of every trial with it."""
        solo = ["replicas.on_peer_failure=solo"] if method == "solo" else []
        waits = [f"world.{name}_deadline={DEADLINE}" for name in ("outer", "eval")]
        waits += [f"world.join_deadline={JOIN}", f"world.silence={SILENCE}", f"run.grace={GRACE}"]
        more = ["run.checkpoint_every=4", "run.validate_every=5", "model.ffn=48", *waits, *solo, *assignments]
        return tiny(self._text, *more, method="noloco" if solo else method, workers=WORKERS, steps=STEPS)

    def whole(self, method: str) -> bytes:
        """The model of the run that nobody hit."""
        if method not in self._whole:
            out = self.folder / f"whole-{method}"
            run(self.config(method), out)
            self._whole[method] = (out / "model.safetensors").read_bytes()
        return self._whole[method]

    def hold(self, trial: Trial) -> Outcome:
        """Make it, and judge how it ended."""
        self._count += 1
        folder = self.folder / f"trial-{self._count}"
        folder.mkdir()
        plan = folder / "fault.json"
        plan.write_text(json.dumps({"kind": trial.kind, "moment": trial.moment, "worker": trial.worker}))
        config, out = self.config(trial.method, "world.backend=distributed"), folder / "run"
        error = _ended(lambda: _launched(trial, config, out))
        over = time.time()
        plan.unlink()
        when = folder / "when"
        if not when.exists():
            return Outcome(end="finished", words="", seconds=0.0, wrong=f"the fault never struck: {error!r}")
        seconds = over - float(when.read_text())
        words = "" if error is None else str(error)
        end = "finished" if error is None else "stopped" if isinstance(error, Interrupted) else "failed"
        wrong = self._wrong(trial, error, words, seconds, out)
        return Outcome(end=end, words=words, seconds=seconds, wrong=wrong)

    def _wrong(self, trial: Trial, error: BaseException | None, words: str, seconds: float, out: Path) -> str:
        if left := processes():
            return f"processes are left: {left}"
        if error is None:
            goes_on = trial.method == "solo" or trial.kind in ("NaN", "round", "TERM")
            return "" if goes_on and (out / "model.safetensors").exists() else "it finished as if nothing had been"
        if not isinstance(error, CommError | OSError | Interrupted):
            return f"another kind of error: {error!r}"
        if "\n" in words:
            return "more than one line"
        if seconds > trial.limit:
            return f"{seconds:.1f} s, where {trial.limit:g} are stated"
        if not isinstance(error, Interrupted) and not _names(trial, words):
            return "it does not name the cause"
        return self._resumed(trial, out)

    def _resumed(self, trial: Trial, out: Path) -> str:
        steps = Checkpoints(out).steps()
        if not steps or trial.method == "solo" or trial.kind == "length":
            return ""  # of `solo` bits hang on the moment; gloo takes a short message, and tells nobody
        error = _ended(
            lambda: _launched(trial, self.config(trial.method, "world.backend=distributed"), out, max(steps))
        )
        if error is not None:
            return f"it does not resume: {error}"
        same = (out / "model.safetensors").read_bytes() == self.whole(trial.method)
        return "" if same else f"resumed after step {max(steps)} to other bits"


def _names(trial: Trial, words: str) -> bool:
    """Whether the line says who, and what, as far as anybody can know."""
    if trial.kind in ("length", "round"):  # the others see that somebody sends what does not fit, or nothing
        return re.search(r"worker \d", words) is not None
    what = {"KILL": "-9", "SEGV": "-11", "thread": "exit code 7", "disk": "No space left on device"}.get(trial.kind, "")
    return what in words and (trial.kind == "disk" or f"worker {trial.worker}" in words)


def _ended(action: Any) -> BaseException | None:
    try:
        action()
    except (Exception, KeyboardInterrupt) as error:
        return error
    return None


def _nothing(*_: Any) -> None:
    pass


def _launched(trial: Trial, config: Config, out: Path, resume: int | None = None) -> None:
    if trial.launcher == "one machine":
        launch(config, out, _nothing, _nothing, resume, start_workers=_starter(trial))
        return
    with _token(out.parent) as (host, guest):
        ended: list[BaseException | None] = []
        node_1 = threading.Thread(
            target=lambda: ended.append(
                _ended(lambda: following.follow(config, out.parent / "run1", _nothing, _nothing, resume, guest))
            )
        )
        node_1.start()
        try:
            launch(config, out, _nothing, _nothing, resume, host, _starter(trial))
        finally:
            node_1.join(60.0)
        if not ended:
            raise AssertionError("node 1 hangs")


@contextmanager
def _token(folder: Path) -> Iterator[tuple[NodeSpec, NodeSpec]]:
    """Two nodes on loopback."""
    from isles.comm import credentials
    from isles.launch.addresses import listen

    with listen(0, "127.0.0.1") as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as kept:
        mine = Path(kept, "credentials")
        token = credentials.found(mine).token
        common = NodeSpec(nodes=2, node=0, rendezvous=where, token=token, credentials=mine)
        before = following.train_process
        following.train_process = striking.struck_process  # type: ignore[assignment]
        try:
            yield common, replace(common, node=1, credentials=None)
        finally:
            following.train_process = before  # type: ignore[assignment]


def _starter(trial: Trial) -> Any:
    def start(config: Config, out: Path, resume: int | None, node_group: NodeGroup) -> Workers:
        start_server()
        pool = LocalWorkers(
            striking.struck_process,
            config.world.workers,
            args=(config, out, resume),
            deadlines=deadlines(config),
            logs=out / "logs",
            node_group=node_group,
            check=Schema(config),
        )
        if trial.moment == "join" and (out.parent / "fault.json").exists():
            process = pool.processes[trial.worker]
            assert process.pid is not None
            striking.note_time(out)
            os.kill(process.pid, SIGNALS[trial.kind])
        return pool

    return start


def table(outcomes: Sequence[tuple[Trial, Outcome]]) -> str:
    """Markdown: a row a kind of fault, a column a moment; how trials ended, and the longest time to know it."""
    cells: defaultdict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for trial, outcome in outcomes:
        cells[trial.kind, trial.moment].append(outcome)

    def cell(kind: str, moment: str) -> str:
        own = cells.get((kind, moment), [])
        ends = [f"{sum(one.end == end for one in own)} {end}" for end in ("finished", "failed", "stopped")]
        known = [one.seconds for one in own if one.end != "finished"]
        longest = f"; {max(known):.1f} s" if known else ""
        return ", ".join(end for end in ends if not end.startswith("0 ")) + longest or "-"

    lines = ["| fault | " + " | ".join(MOMENTS) + " |", "|---" * (len(MOMENTS) + 1) + "|"]
    lines += [f"| {kind} | " + " | ".join(cell(kind, moment) for moment in MOMENTS) + " |" for kind in KINDS]
    return "\n".join(lines)


def write_table(outcomes: Sequence[tuple[Trial, Outcome]]) -> None:
    """Into docs/guarantees.md, between its marks."""
    text, (begin, end) = _DOC.read_text(encoding="utf-8"), _MARKS
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    wrong = sum(bool(outcome.wrong) for _, outcome in outcomes)
    told = f"{len(outcomes)} trials, {wrong} of them not as promised (`python -m tests.faults.harness {len(outcomes)}`)"
    _DOC.write_text(f"{before}{begin}\n{told}\n\n{table(outcomes)}\n{end}{after}", encoding="utf-8")


def main(arguments: Mapping[str, Any]) -> int:
    """Make the trials; the exit code."""
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="isles-trials-") as folder:
        bench = Bench(Path(folder))
        for seed in range(arguments["first"], arguments["first"] + arguments["trials"]):
            trial = drawn(seed)
            outcome = bench.hold(trial)
            outcomes.append((trial, outcome))
            print(f"{seed}: {trial}: {outcome.end} in {outcome.seconds:.1f} s: {outcome.words}", flush=True)
            if outcome.wrong:
                print(f"   WRONG: {outcome.wrong}", flush=True)
    print(table(outcomes))
    if arguments["write"]:
        write_table(outcomes)
    return int(any(outcome.wrong for _, outcome in outcomes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trials", type=int)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--write", action="store_true", help="put the table into docs/guarantees.md")
    sys.exit(main(vars(parser.parse_args())))
