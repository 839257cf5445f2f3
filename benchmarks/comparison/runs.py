"""Runs that are made once. A judged run that has ended is a line of rows.jsonl, which is committed; one that was
stopped goes on from its checkpoint.

    OUT/PART/ROW-SEED/     run directories, as `isles train` writes them; of no use any more when the line is there

    {"key", "seed", "run": run_name of its configuration, "settings": the commit of the settings, "summary",
     "validation": [[step, loss], ...], "prices": {links: time and bytes as of 1B}}
"""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.comparison.cases import TOPOLOGIES, Case, Key
from isles.experts.jobs import ExpertTask, JobProgress, run_tasks
from isles.plan.run_plan import priced
from isles.report.comparison import never_talks
from isles.report.rundir import read_run
from isles.report.units import format_seconds
from isles.running.run import launch
from isles.training.config.reading import read_config, run_name
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.rundir import CONFIG, METRICS, lock_run

RunRow = dict[str, Any]


class Printed(JobProgress):
    """A line on stderr for every piece of work that ends."""

    def __init__(self, pieces: int) -> None:
        self.pieces, self.ended = pieces, 0

    def end(self, name: str) -> None:
        self.ended += 1
        self.notice(f"[{self.ended}/{self.pieces}] {name}")

    def notice(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def finished(rows: Path) -> dict[tuple[Key, int], RunRow]:
    """The lines of rows.jsonl by key and seed."""
    lines = rows.read_text(encoding="utf-8").splitlines() if rows.exists() else []
    return {(tuple(one["key"]), one["seed"]): one for one in map(json.loads, lines)}


def missing(cases: Sequence[Case], rows: Path) -> list[Case]:
    """Those that have no line yet. ValueError where a line is of other settings: judged seeds are touched once."""
    there = finished(rows)
    for case in cases:
        one = there.get((case.key, case.seed))
        if one is not None and one["run"] != run_name(case.config):
            raise ValueError(f"{rows}: {case.name} was judged with other settings; it is not judged again")
    return [case for case in cases if (case.key, case.seed) not in there]


def run_missing(cases: Sequence[Case], out: Path, rows: Path, at_once: int, settings: str) -> None:
    """Make the runs that are missing, `at_once` at a time. settings: the commit that says with which. After Ctrl-C
    (KeyboardInterrupt) the same call goes on.
    """
    left = missing(cases, rows)
    progress = Printed(len(left))
    progress.notice(f"{len(cases)} runs, {len(left)} of them to be made")
    tasks = [ExpertTask(name=case.name, work=partial(_run, case, out, rows, settings)) for case in left]
    run_tasks(tasks, at_once, progress)


def append(file: Path, record: Mapping[str, Any]) -> None:
    """A line, in one piece, whoever else writes."""
    with file.open("a", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        handle.write(json.dumps(record) + "\n")


def _run(case: Case, out: Path, rows: Path, settings: str, progress: JobProgress) -> None:
    """Make one run in its folder; what is there of other settings is replaced."""
    folder, begun = out / case.folder, time.perf_counter()
    steps = Checkpoints(folder).steps() if _same(case, folder) else []
    if not steps and folder.exists():
        _clear(folder)
    summary = launch(case.config, folder, lambda line: None, lambda notice: None, steps[-1] if steps else None)
    loss = summary["val_loss_replicas" if never_talks(summary) else "val_loss"]
    curve = [point for point in read_run(folder).validation if point[0] < summary["steps"]]
    record = {"key": case.key, "seed": case.seed, "run": run_name(case.config), "settings": settings}
    record |= {"summary": summary, "validation": [*curve, [summary["steps"], loss]], "prices": _prices(case, rows)}
    append(rows, record)
    progress.end(f"{case.name}: {loss:.4f} after {format_seconds(time.perf_counter() - begun)}")


def _prices(case: Case, rows: Path) -> dict[str, Any]:
    """Those of another seed where they are there: no loss, and hardly the clock, depends on it."""
    for (key, _), one in finished(rows).items():
        if key == case.key:
            return one["prices"]
    return {links: priced(case.config, case.priced_as, links) for links in TOPOLOGIES}


def _same(case: Case, folder: Path) -> bool:
    """Whether the folder's run has the case's settings; what its version did not have yet is at its default."""
    try:
        return read_config(str(folder / CONFIG), {}, []) == case.config
    except ValueError:  # none there, or one of a version that this one cannot read
        return False


def _clear(folder: Path) -> None:
    """Remove a run. ValueError where it still goes on, or where the folder holds something else."""
    with lock_run(folder):
        names = {path.name for path in folder.iterdir()} - {"run.lock"}
        if names and not names & {CONFIG, METRICS}:
            raise ValueError(f"{folder}: is in the way and holds no run; name another --out")
        shutil.rmtree(folder)
