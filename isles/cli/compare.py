"""`isles compare`: several methods at equal terms: the same data, seeds and tokens; one table, one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isles.cli.signals import end_in_order


def compare(
    sources: Annotated[
        list[str] | None, typer.Argument(metavar="[CONFIG.toml | RUN...]", help="Settings, or finished runs.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Rows: diloco,diloco@replicas.outer_lr=0.4,NAME of a table [methods.NAME].")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2,3,4",
    sweep: Annotated[list[str] | None, typer.Option(metavar="KEY=A,B,C", help="Rows by value; repeatable.")] = None,
    tuned: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Settings of the searches isles tune --out DIR/ROW.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Workers of every run.")] = None,
    steps: Annotated[int | None, typer.Option(help="Inner steps a worker.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting; repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what will be run, and how long.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model and few steps: see what comes out.")] = False,
    out: Annotated[Path | None, typer.Option(help="New directory. Default: runs/compare-DATE-TIME.")] = None,
) -> None:
    """Train with each method and each seed, one after another, and print how they did; or compare finished runs.

    Beside them: workers that never talk (none), and one worker that reads all the tokens (one-worker).
    """
    from isles.cli.several import rows
    from isles.cli.several.running import new_folder, run_all, seeds_of, show, write_pages
    from isles.cli.several.terms import tuned_in
    from isles.cli.table import print_table
    from isles.training.config.reading import method_tables

    end_in_order()
    folders = [Path(source) for source in sources or [] if Path(source).is_dir()]
    if len(sources or []) > max(len(folders), not folders):
        raise ValueError(f"{' '.join(sources or [])}: finished runs, or one CONFIG.toml, but not both")
    if folders:
        if dry_run or quick or any(given is not None for given in (methods, sweep, tuned, workers, steps, set_)):
            raise ValueError("finished runs are compared as they are: leave all options but --out away")
        out = new_folder(out, "compare")
        summaries = rows.of_runs(folders, out)
        write_pages(out, summaries)
        show(out, summaries)
        return
    config = sources[0] if sources else None
    flags = rows.quick() if quick else {}
    flags = flags | {key: n for key, n in (("world.workers", workers), ("run.steps", steps)) if n is not None}
    chosen = rows.rows_of(methods or ",".join(method_tables(config)) or rows.USUAL)
    for one in sweep or []:
        chosen = rows.swept(config, chosen, one, flags, set_ or [])
    numbers, found = seeds_of(seeds), None
    configs = rows.with_references(config, rows.read_all(config, chosen, numbers, flags, set_ or []), flags, set_ or [])
    if tuned is not None:
        found = tuned_in(tuned, {label.split("@")[0]: one for (label, _), one in configs.items()})
        configs = rows.read_all(config, chosen, numbers, flags, set_ or [], found)
        configs = rows.with_references(config, configs, flags, set_ or [], found)
    if dry_run:
        print_table(rows.estimate(configs))
        print("dry run: nothing was started or written")
        return
    show(*run_all(configs, out, "compare"))
