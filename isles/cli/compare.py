"""`isles compare`: several methods at equal terms: the same data, seeds and tokens; one table, one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isles.cli.signals import end_in_order


def compare(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.toml | RUN...]", help="Settings of all, or finished runs. Default: a small run."
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Rows, separated by commas: a method, one with settings (diloco@replicas.outer_lr=0.4), or NAME of a "
            "table [methods.NAME]. Default: those tables, or none,ddp,localsgd,diloco,noloco."
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2,3,4",
    sweep: Annotated[
        list[str] | None, typer.Option(metavar="SECTION.KEY=A,B,C", help="Each row with each value; repeatable.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Workers of every run.")] = None,
    steps: Annotated[int | None, typer.Option(help="Inner steps a worker.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting; repeatable.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be run, and about how long it takes here.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model and few steps: see what comes out.")] = False,
    out: Annotated[Path | None, typer.Option(help="New directory. Default: runs/compare-DATE-TIME.")] = None,
) -> None:
    """Train with each method and each seed, one after another, and print how they did; or compare finished runs.

    Beside them: workers that never talk (none), and one worker that reads all the tokens (one-worker).
    """
    from isles.cli.runs import rows
    from isles.cli.runs.several import new_folder, run_all, seeds_of, show, write_pages
    from isles.cli.table import print_table
    from isles.report.panels import Table
    from isles.training.config.reading import method_tables

    end_in_order()
    sources = sources or []
    folders = [Path(source) for source in sources if Path(source).is_dir()]
    if folders:
        _refuse_with_runs(sources, [methods, sweep, workers, steps, set_], dry_run or quick)
        out = new_folder(out, "compare")
        summaries = rows.of_runs(folders, out)
        write_pages(out, summaries)
        show(out, summaries)
        return
    if len(sources) > 1:
        raise ValueError(f"{sources[1]}: one CONFIG.toml, or several directories of finished runs")
    config = sources[0] if sources else None
    flags = rows.QUICK if quick else {}
    flags = flags | {key: n for key, n in (("world.workers", workers), ("run.steps", steps)) if n is not None}
    chosen = rows.rows_of(methods or ",".join(method_tables(config)) or rows.USUAL)
    for one in sweep or []:
        chosen = rows.swept(config, chosen, one, flags, set_ or [])
    configs = rows.read_all(config, chosen, seeds_of(seeds), flags, set_ or [])
    configs = rows.with_references(config, configs, flags, set_ or [])
    if dry_run:
        heads = ["row", "seeds", "workers", "steps", "tokens", "about"]
        print_table(Table(heads=heads, rows=rows.estimate(configs)))
        print("dry run: nothing was started or written")
        return
    show(*run_all(configs, out, "compare"))


def _refuse_with_runs(sources: list[str], options: list[object], flag: bool) -> None:
    """ValueError where finished runs are given beside what is for new ones."""
    for source in sources:
        if not Path(source).is_dir():
            raise ValueError(f"{source}: is no directory of a run, as the others are")
    if flag or any(option is not None for option in options):
        raise ValueError("finished runs are compared as they are: leave all options but --out away")
