"""Settings of every row by one budget each, on another seed and on text that no judged run is judged by.

    settings.jsonl    {"key", "settings", "loss", "trials", "saved", "seed", "tried": [[settings, loss], ...]}

A line a search that has ended; tried: the trials that came to their end. (The searches of the lines here were made
before a tie went on at the second look of `isles tune`; what they had given up in one was run to its end afterwards.)

It is committed before a judged seed is touched: `committed` refuses otherwise.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comparison.cases import ROWS, Case, tuned_settings
from benchmarks.comparison.runs import Printed, append
from isles.base.durable import replacing
from isles.cli.several import Study, Terms
from isles.data import load_corpus
from isles.data.config import DataConfig
from isles.experts.jobs import ExpertTask, JobProgress, run_tasks
from isles.report.comparison import complete, saved
from isles.running.run import launch
from isles.training.config.sections import Config

SEED, TRIALS = 1000, 8


def tune_missing(cases: Sequence[Case], out: Path, file: Path, trials: int, at_once: int) -> None:
    """Search for the settings of every key that has none yet. After Ctrl-C the same call goes on."""
    there = tuned_settings(file)
    left = {case.key: case for case in reversed(cases) if case.key not in there}
    progress = Printed(len(left))
    progress.notice(f"{len({case.key for case in cases})} searches, {len(left)} of them to be ended")
    for case in [*left.values()][:1]:
        training_text(case.base.data, out / "tuning" / "text.txt")  # before several want it at once
    tasks = [ExpertTask(name=" ".join(key), work=partial(_tune, case, out, file, trials)) for key, case in left.items()]
    run_tasks(tasks[::-1], at_once, progress)


def untuned(cases: Sequence[Case], file: Path) -> None:
    """ValueError for rows without settings of their own."""
    there = tuned_settings(file)
    if left := dict.fromkeys(" ".join(case.key) for case in cases if case.key not in there):
        raise ValueError(f"not tuned yet: {', '.join(left)}: --block tune first")


def committed(file: Path) -> str:
    """The commit that last changed `file`. ValueError where it holds what no commit has."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words, "--", file.name], cwd=file.parent, capture_output=True, text=True)
        return done.stdout.strip()

    commit = git("log", "-1", "--format=%H")
    if not commit or git("status", "--porcelain"):
        raise ValueError(f"{file}: commit the settings before judged seeds are touched")
    return commit


def _tune(case: Case, out: Path, file: Path, trials: int, progress: JobProgress) -> None:
    folder = out / "tuning" / "-".join(case.key)
    text = training_text(case.base.data, folder.parent / "text.txt")
    config = replace(case.base, data=replace(case.base.data, path=str(text)))
    terms = Terms(config=config, at="tokens", seed=SEED, trials=trials)
    study = Study(terms if ROWS[case.key[1]].searched else replace(terms, over=terms.inner), folder)

    def train(number: int, one: Config, place: Path, look: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        return launch(one, place, look, lambda notice: None)

    study.work(lambda: False, train)
    told = study.record()
    if any(one["state"] == "running" for one in told["trials"]):
        return  # another process is at it, and writes the line
    best = complete(told)[0]
    record = {"key": case.key, "settings": best["settings"], "loss": best["loss"]}
    tried = [[one["settings"], round(one["loss"], 4)] for one in complete(told)]
    append(file, record | {"trials": trials, "saved": round(saved(told), 4), "seed": SEED, "tried": tried})
    progress.end(f"{' '.join(case.key)}: {best['loss']:.4f}")


def training_text(data: DataConfig, file: Path) -> Path:
    """What judged runs train on, whose own end is kept out of training in a search."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        stream = load_corpus(data).train
        with replacing(file) as partial_file:
            partial_file.write_bytes(np.asarray(stream.tokens).astype(np.uint8).tobytes())
    return file
