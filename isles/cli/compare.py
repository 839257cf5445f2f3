"""`isles compare`: several methods at the same data, seeds and tokens; one table, one page."""

from __future__ import annotations

import json
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer


def compare(
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG.toml]", help="Default: the embedded small run.")
    ] = None,
    methods: Annotated[str, typer.Option(help="Names, separated by commas.")] = "none,ddp,localsgd,diloco,noloco",
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0",
    workers: Annotated[int | None, typer.Option(help="Workers of every run.")] = None,
    steps: Annotated[int | None, typer.Option(help="Inner steps a worker.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New directory. Default: runs/compare-DATE-TIME.")] = None,
) -> None:
    """Train with each method and each seed, one after another, and print how they did."""
    from isles.cli.progress import Progress
    from isles.cli.table import print_table
    from isles.report import write_picture, write_report
    from isles.report.comparison import INDEX, comparison_rows, run_folder
    from isles.report.panels import Table
    from isles.training.border import read_config
    from isles.training.launch import Interrupted, launch

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names, numbers = _list(methods, "--methods"), [_seed(text) for text in _list(seeds, "--seeds")]
    # All are read before the first is run: a slip in the last method should not cost the hours of the others.
    configs = {
        (name, seed): read_config(
            config,
            {"replicas.method": name, "run.seed": seed, "world.workers": workers, "run.steps": steps},
            set_ or [],
            shared=True,
        )
        for name in names
        for seed in numbers
    }
    out = out or Path("runs") / f"compare-{datetime.now():%Y%m%d-%H%M%S}"
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"--out {out}: is not empty; name another directory")
    summaries = {name: [] for name in names}
    try:
        for (name, seed), one in configs.items():
            folder = out / run_folder(name, seed)
            with Progress(f"{name}, seed {seed}:", one.world.workers, one.run.steps) as progress:
                summaries[name].append(launch(one, folder, progress.line, progress.notice))
            write_report(folder)  # its picture, a second each, by `isles report` where it is wanted
    except Interrupted as stop:
        print(f"isles: {stop}; the runs after it were not begun", file=sys.stderr)
        raise typer.Exit(130) from None
    (out / INDEX).write_text(json.dumps(summaries, indent=2) + "\n", encoding="utf-8")
    heads, rows = comparison_rows(summaries)
    print_table(Table(heads=heads, rows=rows))
    print(f"report  {write_report(out)}")
    write_picture(out)


def _list(text: str, option: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{option} {text}: name each one once, separated by commas")
    return names


def _seed(text: str) -> int:
    if not text.isdigit():
        raise ValueError(f"--seeds: {text!r} is no seed; write whole numbers such as 0,1,2")
    return int(text)
