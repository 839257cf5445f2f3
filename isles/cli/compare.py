"""`isles compare`: several methods at equal terms: the same data, seeds and tokens; one table, one page;
`isles report RUN...`: the page of finished or running runs, and of comparisons; the picture where asked.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from isles.cli.terminal import As, InnerSteps, Set, end_in_order, print_table, takes_settings
from isles.report import write_picture, write_report


@takes_settings
def compare(
    sources: Annotated[
        list[str] | None, typer.Argument(metavar="[CONFIG.toml | RUN...]", help="Settings, or finished runs.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Rows: diloco,diloco@replicas.outer_lr=0.4,NAME of \\[methods.NAME]; or all."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2,3,4",
    sweep: Annotated[list[str] | None, typer.Option(metavar="KEY=A,B,C", help="Rows by value; repeatable.")] = None,
    tuned: Annotated[Path | None, typer.Option(metavar="DIR", help="As found by isles tune --out DIR/ROW.")] = None,
    workers: Annotated[int | None, typer.Option(help="Workers of every run.")] = None,
    steps: InnerSteps = None,
    set_: Set = None,
    as_: As = None,
    over: Annotated[list[str] | None, typer.Option(metavar="LINKS", help="Finished runs --as: over these.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what will be run, and how long.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model and few steps: see what comes out.")] = False,
    out: Annotated[Path | None, typer.Option(help="New directory. Default: runs/compare-DATE-TIME.")] = None,
) -> None:
    """Train with each method and each seed, one after another, and print how they did; or compare finished runs.

    Beside them: workers that never talk (none), and one worker that reads all the tokens (one-worker).
    """
    from isles.cli import several
    from isles.cli.several import new_folder, run_all, seeds_of, show, tuned_in, write_pages
    from isles.training.config.reading import method_tables

    end_in_order()
    stray = [one for one in sources or [] if methods and not one.endswith(".toml") and not Path(one).exists()]
    if stray:
        flag = f"--methods {','.join([str(methods), *stray])}"
        raise ValueError(f"{' '.join(stray)}: no such file or folder; methods are one word, with commas: {flag}")
    folders = [Path(source) for source in sources or [] if Path(source).is_dir()]
    if len(sources or []) > max(len(folders), not folders):
        raise ValueError(f"{' '.join(sources or [])}: finished runs, or one CONFIG.toml, but not both")
    if over and not (folders and as_):
        raise ValueError("--over prices finished runs: isles compare RUN... --as MODEL --over LINKS")
    if folders:
        if dry_run or quick or any(value is not None for value in (methods, sweep, tuned, workers, steps, set_)):
            raise ValueError("finished runs are as they are: leave all options but --as, --over and --out away")
        out = new_folder(out, "compare")
        summaries = several.of_runs(folders, out, as_, over)
        write_pages(out, summaries)
        show(out, summaries)
        return
    config = sources[0] if sources else None
    flags = several.quick() if quick else {}
    flags |= {} if as_ is None else {"run.priced_as": as_, "world.backend": "virtual"}
    flags = flags | {key: n for key, n in (("world.workers", workers), ("run.steps", steps)) if n is not None}
    chosen = several.rows_of(methods or ",".join(method_tables(config)) or several.USUAL)
    shared = several.SharedSettings(config, flags, set_ or [])
    for one in sweep or []:
        chosen = several.swept(shared, chosen, one)
    read = partial(several.read_beside, shared, chosen, seeds_of(seeds))
    configs = read()
    if tuned is not None:
        configs = read(tuned_in(tuned, {label.split("@")[0]: one for (label, _), one in configs.items()}))
    if dry_run:
        print_table(several.estimate(configs))
        print("dry run: nothing was started or written")
        return
    show(*run_all(configs, out, "compare"))


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or folders of isles compare or isles experts.")],
    png: Annotated[
        bool, typer.Option("--png", help="Also write report.png: the pictures of the page, for a mail or a slide.")
    ] = False,
) -> None:
    """Write report.html into each directory."""
    for run in runs:
        print(write_report(run))
        if png:
            print(write_picture(run))
