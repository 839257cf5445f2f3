"""Several runs one after another, as `isles compare` and `isles simulate` make them: one folder each, one table, one
page.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from isles.cli.several.rows import names

if TYPE_CHECKING:
    from isles.cli.several.rows import Configs
    from isles.training.config.sections import Config
    from isles.training.records.summary import SummaryTable

OnMetrics, OnNotice = Callable[[dict[str, Any]], None], Callable[[str], None]
Start = Callable[["Config", Path, OnMetrics, OnNotice], "SummaryTable"]
"""As `isles.running.run.launch`."""


def run_all(
    configs: Configs, out: Path | None, verb: str, start: Start | None = None
) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    """Train them into `out` (runs/VERB-DATE-TIME where that is None) and write the page and the picture; the folder,
    and the summaries by row. typer.Exit(130) where that is interrupted. ValueError: `out` is in use.
    start: in the place of `launch`.
    """
    from isles.cli.progress import Progress
    from isles.cli.train import report_device
    from isles.launch.workers import refuse_too_many
    from isles.plan.prices import priced
    from isles.plan.run_plan import refuse
    from isles.report import write_report
    from isles.report.comparison import run_folder
    from isles.report.units import format_seconds
    from isles.running.run import Interrupted, launch
    from isles.training.interrupts import Interrupts
    from isles.training.stage_runner import refuse_stages

    for one in configs.values():
        refuse_stages(one)
        if one.world.backend != "virtual":
            refuse_too_many(one.world.workers)
    for one in {name: one for (name, _), one in configs.items()}.values():  # seeds change nothing of it
        refuse(one, joined=start is not None)
        if one.run.priced_as:
            priced(one, one.run.priced_as)  # refuses, too
    begin = start or launch
    out = new_folder(out, verb)
    report_device(next(iter(configs.values())))  # as all others
    summaries: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in configs}
    labels, folder, begun = list(summaries), out, time.monotonic()
    work = {place: one.run.steps * one.world.workers for place, one in configs.items()}  # about as long each
    done = 0
    try:
        with Interrupts() as interrupts:
            for (name, seed), one in configs.items():
                interrupts.check()
                folder = out / run_folder(name, seed)
                left = (time.monotonic() - begun) * (sum(work.values()) / done - 1) if done else None
                about = "" if left is None else f", {format_seconds(left)} left"
                title = f"{name} ({labels.index(name) + 1} of {len(labels)}), seed {seed}{about}:"
                done += work[name, seed]
                with Progress(title, one.world.workers, one.run.steps, plain=f"{title} ") as progress:
                    summaries[name].append(begin(one, folder, progress.line, progress.notice))
                write_report(folder)
    except KeyboardInterrupt as stop:
        what = str(stop) if isinstance(stop, Interrupted) else f"stopped after {folder}"
        print(f"isles: {what}; the runs after it were not begun", file=sys.stderr)
        raise typer.Exit(130) from None
    write_pages(out, summaries)
    return out, summaries


def new_folder(out: Path | None, verb: str) -> Path:
    """`out`, or runs/VERB-DATE-TIME. ValueError where it holds something."""
    out = out or Path("runs") / f"{verb}-{datetime.now():%Y%m%d-%H%M%S}"
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out {out}: is not empty; name another directory")
    return out


def write_pages(out: Path, summaries: dict[str, list[dict[str, Any]]]) -> None:
    """The index of a comparison and its page."""
    from isles.report import write_report
    from isles.report.comparison import INDEX

    out.mkdir(parents=True, exist_ok=True)
    (out / INDEX).write_text(json.dumps(summaries, indent=2) + "\n", encoding="utf-8")
    write_report(out)


def show(out: Path, summaries: dict[str, list[dict[str, Any]]]) -> None:
    """Print the table and where the page is."""
    from isles.cli.terminal import print_table
    from isles.report.comparison import comparison_rows
    from isles.report.panels import Table

    heads, rows = comparison_rows(summaries)
    print_table(Table(heads=heads, rows=rows))
    print(f"report  {out / 'report.html'}")


def seeds_of(text: str) -> list[int]:
    """The numbers of --seeds."""
    found = names(text, "--seeds")
    for part in found:
        if not part.isdigit():
            raise ValueError(f"--seeds: {part!r} is no seed; write whole numbers such as 0,1,2")
    return [int(part) for part in found]
