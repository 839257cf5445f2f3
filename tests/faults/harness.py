"""Trials: a small run, a fault, a moment, a worker, a launcher; and whether it ended as `docs/guarantees.md` says.

    python -m tests.faults.harness 500                              # so many seeded trials; a line each, and the table
    python -m tests.faults.harness 100 --first 300 --kept FILE      # more of them, the table of all that FILE holds
    python -m tests.faults.harness 500 --write                      # and the table into docs/guarantees.md

A trial ends in one of three ways: the run finishes (what was hit healed, or `solo` went on without it); it fails with
one line that names the worker, and what it saved resumes to the bits of the run that nobody hit; or it stops in good
order (SIGTERM), and resumes likewise.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isles.comm.errors import CommError
from isles.running.run import Interrupted
from isles.training.config import world
from isles.training.config.sections import Config
from isles.training.records.checkpoint import Checkpoints
from tests.faults.launchers import ended, launched
from tests.faults.striking import KINDS, MOMENTS
from tests.faults.trials import DEADLINE, GRACE, JOIN, LAUNCHERS, SILENCE, STEPS, WORKERS, Trial, drawn
from tests.integration.test_faults import workers as processes
from tests.training.runs import run, tiny, write_text

_DOC = Path(__file__).resolve().parents[2] / "docs" / "guarantees.md"
_MARKS = "<!-- trials -->", "<!-- /trials -->"


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
        world._LEAST_SILENCE = 1.0

    def config(self, method: str, backend: str, launcher: str = "") -> Config:
        """Of every trial with it."""
        deadline = SILENCE if launcher == "torchrun" else DEADLINE  # each process loads torch, some later than others
        solo = ["replicas.on_peer_failure=solo"] if method == "solo" else []
        waits = [f"world.{name}_deadline={deadline}" for name in ("outer", "eval")]
        waits += [f"world.join_deadline={JOIN}", f"world.silence={SILENCE}", f"run.grace={GRACE}"]
        more = [
            "run.checkpoint_every=4",
            "run.validate_every=5",
            "model.ffn=48",
            *waits,
            *solo,
            f"world.backend={backend}",
        ]
        return tiny(self._text, *more, method="noloco" if solo else method, workers=WORKERS, steps=STEPS)

    def whole(self, method: str) -> bytes:
        """The model of the run that nobody hit."""
        if method not in self._whole:
            out = self.folder / f"whole-{method}"
            run(self.config(method, "virtual"), out)
            self._whole[method] = (out / "model.safetensors").read_bytes()
        return self._whole[method]

    def hold(self, trial: Trial) -> Outcome:
        """Make it, and judge how it ended."""
        self._count += 1
        folder = self.folder / f"trial-{self._count}"
        folder.mkdir()
        plan = folder / "fault.json"
        plan.write_text(json.dumps({"kind": trial.kind, "moment": trial.moment, "worker": trial.worker}))
        config, out = self.config(trial.method, "distributed", trial.launcher), folder / "run"
        error = ended(lambda: launched(trial, config, out))
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
        if "\n" in words and "Root Cause" not in words:
            return "more than one line"
        if seconds > trial.limit:
            return f"{seconds:.1f} s, where {trial.limit:g} are stated"
        if not isinstance(error, Interrupted) and not _names(trial, words):
            return "it does not name the cause"
        return self._resumed(trial, out)

    def _resumed(self, trial: Trial, out: Path) -> str:
        steps = Checkpoints(out).steps()
        if not steps or trial.method == "solo" or trial.kind == "length":
            return ""  # of `solo` bits depend on the moment; gloo takes a short message, and tells nobody
        error = ended(
            lambda: launched(trial, self.config(trial.method, "distributed", trial.launcher), out, max(steps))
        )
        if error is not None:
            return f"it does not resume: {error}"
        same = (out / "model.safetensors").read_bytes() == self.whole(trial.method)
        return "" if same else f"resumed after step {max(steps)} to other bits"


def _names(trial: Trial, words: str) -> bool:
    """Whether the line says who, and what, as far as anybody can know."""
    dies = trial.kind in ("KILL", "SEGV", "thread")
    if dies and trial.launcher == "torchrun":  # which ends the others at once, and tells exit codes itself
        by_torchrun = re.search(rf"Root Cause[^$]*rank +: {trial.worker} ", words) is not None
        said = f"worker {trial.worker} failed: its process is gone" in words
        return said or (by_torchrun and (trial.worker == 0 or trial.method == "solo"))  # nobody else could say it
    if trial.kind in ("length", "round"):  # the others see that somebody sends what does not fit, or nothing
        return re.search(r"worker \d", words) is not None
    what = {"KILL": "-9", "SEGV": "-11", "thread": "exit code 7", "disk": "No space left on device"}.get(trial.kind, "")
    return what in words and (trial.kind == "disk" or f"worker {trial.worker}" in words)


def table(outcomes: Sequence[tuple[Trial, Outcome]]) -> str:
    """Markdown: a row a kind of fault, a column a moment; how trials ended, and the longest time to know it, but for
    torchrun's own waiting.
    """
    cells: defaultdict[tuple[str, str], list[tuple[Trial, Outcome]]] = defaultdict(list)
    for trial, outcome in outcomes:
        cells[trial.kind, trial.moment].append((trial, outcome))

    def cell(kind: str, moment: str) -> str:
        own = cells.get((kind, moment), [])
        ends = [f"{sum(one.end == end for _, one in own)} {end}" for end in ("finished", "failed", "stopped")]
        known = [one.seconds for trial, one in own if one.end != "finished" and trial.launcher != "torchrun"]
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
    launchers = Counter(trial.launcher for trial, _ in outcomes)
    shares = ", ".join(f"{launchers[name]} on {name}" for name in LAUNCHERS).replace("on run_local", "by `run_local`")
    told = (
        f"{len(outcomes)} trials, {wrong} of them not as promised; {shares.replace('on torchrun', 'under torchrun')}."
    )
    _DOC.write_text(f"{before}{begin}\n{told}\n\n{table(outcomes)}\n{end}{after}", encoding="utf-8")


def read(kept: Path) -> list[tuple[Trial, Outcome]]:
    """What a file of trials holds; a trial that was made again counts as it ended last."""
    lines = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()] if kept.exists() else []
    last = {line["seed"]: (Trial(**line["trial"]), Outcome(**line["outcome"])) for line in lines}
    return list(last.values())


def main(arguments: Mapping[str, Any]) -> int:
    """Make the trials; the exit code."""
    with tempfile.TemporaryDirectory(prefix="isles-trials-") as folder:
        bench, kept = Bench(Path(folder)), arguments["kept"] or Path(folder, "kept.jsonl")
        for seed in range(arguments["first"], arguments["first"] + arguments["trials"]):
            trial = drawn(seed)
            outcome = bench.hold(trial)
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"seed": seed, "trial": asdict(trial), "outcome": asdict(outcome)}) + "\n")
            print(f"{seed}: {trial}: {outcome.end} in {outcome.seconds:.1f} s: {outcome.words}", flush=True)
            if outcome.wrong:
                print(f"   WRONG: {outcome.wrong}", flush=True)
        outcomes = read(kept)
    print(table(outcomes))
    if arguments["write"]:
        write_table(outcomes)
    return int(any(outcome.wrong for _, outcome in outcomes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", type=int)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--kept", type=Path, help="a file to which trials are added, a line each")
    parser.add_argument("--write", action="store_true", help="put the table into docs/guarantees.md")
    sys.exit(main(vars(parser.parse_args())))
