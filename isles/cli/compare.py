"""`isles compare`: several methods at the same data, seeds and tokens; one table, one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isles.cli.signals import end_in_order


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
    from isles.cli.several import names, read_all, run_all, seeds_of, show

    end_in_order()
    flags = {"world.workers": workers, "run.steps": steps}
    show(*run_all(read_all(config, names(methods, "--methods"), seeds_of(seeds), flags, set_ or []), out, "compare"))
