"""What `isles experts` prints: progress, jobs, results, plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typing_extensions import override

from isles.cli.terminal import Progress as Bar
from isles.cli.terminal import bars, print_table
from isles.experts.hdee import TRAINED
from isles.experts.jobs import JobProgress
from isles.experts.planning import planned
from isles.experts.reading import ExperimentConfig
from isles.experts.smalltalk import table
from isles.experts.system import System
from isles.report import write_report
from isles.report.experts import tables
from isles.report.panels import Table
from isles.report.units import format_bytes


class Shown(JobProgress):
    """A bar (or plain lines) for each run that is under way."""

    def __init__(self) -> None:
        self.runs: dict[str, Bar] = {}
        self.bars = bars()

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    @override
    def begin(self, name: str, workers: int, steps: int) -> None:
        if not self.runs:
            self.bars = bars()  # one that was stopped stays on the screen
            self.bars.start()
        self.runs[name] = Bar(name, workers, steps, self.bars, plain=f"{name}  ")

    @override
    def line(self, name: str, line: dict[str, Any]) -> None:
        self.runs[name].line(line)

    @override
    def end(self, name: str) -> None:
        run = self.runs.pop(name)
        if not self.runs:
            self.bars.stop()
        elif self.bars.console.is_terminal:  # the display holds those that are under way
            self.bars.remove_task(run.task)
            self._print(f"{name}  done")

    @override
    def notice(self, text: str) -> None:
        self._print(f"note: {text}")

    def _print(self, text: str) -> None:
        self.bars.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_jobs(system: System[Any]) -> None:
    """Every run: name, state, what it starts from."""
    rows = []
    for name, (job, state) in system.jobs().items():
        start = job.config.run.start
        rows.append([name, job.role, state, str(job.config.run.steps), start or "-"])
    print_table(Table(heads=["run", "role", "state", "steps", "starts from"], rows=rows, names=3))


def print_results(results: dict[str, Any], out: Path) -> None:
    """The tables of a finished system, and the path of its page."""
    for title, what, found in tables(results):
        print(title, what, sep="\n")
        print_table(found)
        print()
    print(f"results {out / 'results.json'}", f"report  {write_report(out)}", sep="\n")


def print_paper(as_json: bool) -> None:
    """Table 3 of the SMALLTALK paper."""
    rows = table()
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    print("Table 3 of arXiv 2410.03529: FLOPs of training (1e19) and of a sequence at inference (1e12)")
    heads = ["expert", "experts", "training", "overhead", "inference", "overhead"]
    units = {"training": 1e19, "training_overhead": 1e19, "inference": 1e12, "inference_overhead": 1e12}
    shown = [
        [row["expert"], str(row["experts"]), *(f"{row[key] / unit:.2f}" for key, unit in units.items())] for row in rows
    ]
    print_table(Table(heads=heads, rows=shown))


def print_plan(asked: ExperimentConfig[Any], as_json: bool) -> None:
    """What a system will cost."""
    found = planned(asked)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    rows = [[row["name"], f"{row['flops']:.3g}", f"{row['tokens']:,}", str(row["steps"])] for row in found["runs"]]
    print(f"{found['system']}: runs{' of one seed' if found['system'] == 'hdee' else ''}")
    print_table(Table(heads=["run", "FLOPs", "tokens", "steps"], rows=rows))
    print()
    for variant, ratio in found.get("budget", {}).items():
        print(f"budget  {variant}: {ratio:.4f} of {len(TRAINED)} reference experts")
    for name, value in found["flops"].items():
        print(f"FLOPs   {name}: {value:.3g}")
    for name, value in found["bytes"].items():
        print(f"bytes   {name}: {format_bytes(value)}")
