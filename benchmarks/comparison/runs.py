"""Runs that are made once: a finished one of the same settings is taken from its folder, one that was stopped by Ctrl-C
goes on from its checkpoint.

    OUT/methods/LABEL-SEED/          run directories, as `isles train` writes them
    OUT/scaling/METHOD-SIZE-SEED/
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.comparison.cases import Case
from isles.experts.jobs import JobProgress
from isles.experts.tasks import ExpertTask, carry_out
from isles.report.units import format_seconds
from isles.training.config.reading import read_config
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.rundir import CONFIG, METRICS, SUMMARY, held
from isles.training.running.run import launch

Summary = dict[str, Any]


class _Printed(JobProgress):
    """A line on stderr for every run that ends."""

    def __init__(self, runs: int) -> None:
        self.runs, self.ended = runs, 0

    def end(self, name: str) -> None:
        self.ended += 1
        self.notice(f"[{self.ended}/{self.runs}] {name}")

    def notice(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def finished(case: Case, out: Path) -> Summary | None:
    """The summary of a run of these very settings, and when it was written (`finished`, a time stamp); None where there
    is none.
    """
    file = out / case.folder / SUMMARY
    if not file.is_file() or not _same(case, file.parent):
        return None
    return {**json.loads(file.read_text(encoding="utf-8")), "finished": file.stat().st_mtime}


def run_missing(cases: Sequence[Case], out: Path, at_once: int) -> None:
    """Make the runs that are missing, `at_once` at a time. After Ctrl-C (KeyboardInterrupt) the same call goes on."""
    missing = [case for case in cases if finished(case, out) is None]
    progress = _Printed(len(missing))
    progress.notice(f"{len(cases)} runs, {len(missing)} of them to be made")
    tasks = [ExpertTask(name=case.name, work=partial(_run, case, out)) for case in missing]
    carry_out(tasks, at_once, progress)


def _run(case: Case, out: Path, progress: JobProgress) -> None:
    """Make one run in its folder; what is there of other settings is replaced."""
    folder, begun = out / case.folder, time.perf_counter()
    steps = Checkpoints(folder).steps() if _same(case, folder) else []
    if not steps and folder.exists():
        _clear(folder)
    summary = launch(case.config, folder, lambda line: None, lambda notice: None, steps[-1] if steps else None)
    progress.end(f"{case.name}: {summary['val_loss']:.4f} after {format_seconds(time.perf_counter() - begun)}")


def _same(case: Case, folder: Path) -> bool:
    """Whether the folder's run has the case's settings; what its version did not have yet is at its default."""
    try:
        return read_config(str(folder / CONFIG), {}, []) == case.config
    except ValueError:  # none there, or one of a version that this one cannot read
        return False


def _clear(folder: Path) -> None:
    """Remove a run. ValueError where it still goes on, or where the folder holds something else."""
    with held(folder):
        names = {path.name for path in folder.iterdir()} - {"run.lock"}
        if names and not names & {CONFIG, METRICS}:
            raise ValueError(f"{folder}: is in the way and holds no run; name another --out")
        shutil.rmtree(folder)
