"""What `isles experts` prints: progress, jobs, results, plans."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from isles.cli.progress import Progress as Bar
from isles.cli.table import print_table
from isles.experts.border import Asked
from isles.experts.hdee import TRAINED
from isles.experts.jobs import Progress
from isles.experts.system import System
from isles.report.panels import Table
from isles.report.units import format_bytes


class Shown(Progress):
    """One bar (or plain lines) for each run, after another."""

    def __init__(self) -> None:
        self.bar: Bar | None = None

    def __enter__(self) -> Shown:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def begin(self, name: str, workers: int, steps: int) -> None:
        """See Progress."""
        self._stop()
        self.bar = Bar(name, workers, steps)
        if not self.bar.console.is_terminal:  # there the bar names it
            print(name, file=sys.stderr)
        self.bar.__enter__()

    def line(self, line: dict[str, Any]) -> None:
        """See Progress."""
        if self.bar is not None:
            self.bar.line(line)

    def end(self, summary: dict[str, Any]) -> None:
        """See Progress."""
        self._stop()

    def notice(self, text: str) -> None:
        """See Progress."""
        print(f"note: {text}", file=sys.stderr)

    def _stop(self) -> None:
        if self.bar is not None:
            self.bar.__exit__(None, None, None)
            self.bar = None


def print_jobs(system: System[Any]) -> None:
    """Every run: name, state, what it starts from."""
    rows = []
    for name, (job, state) in system.jobs().items():
        start = job.config.run.start
        rows.append([name, job.role, state, str(job.config.run.steps), start or "-"])
    print_table(Table(heads=["run", "role", "state", "steps", "starts from"], rows=rows, names=3))


def print_results(results: dict[str, Any], out: Path) -> None:
    """The tables of a finished system, and the path of its page."""
    from isles.report import write_report
    from isles.report.experts import tables

    for title, what, table in tables(results):
        print(title, what, sep="\n")
        print_table(table)
        print()
    print(f"results {out / 'results.json'}", f"report  {write_report(out)}", sep="\n")


def print_forest(path: Path, data: str, prior: str, top_k: int | None) -> None:
    """Perplexity of one forest on a text."""
    from isles.experts.on_text import judged_on

    found = judged_on(path, data, prior, top_k)
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:<{width}}  {value}")


def print_plan(asked: Asked[Any], as_json: bool) -> None:
    """What a system will cost."""
    from isles.experts.planning import planned

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
