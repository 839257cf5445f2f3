"""`isles simulate`: many workers on a simulated network, training for real on a virtual clock."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from isles.cli.signals import end_in_order


def simulate(
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG.toml]", help="Default: the embedded small run.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Names, separated by commas. Default: the configuration's one.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, separated by commas. Default: the configuration's one.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Workers of every run.")] = None,
    steps: Annotated[int | None, typer.Option(help="Inner steps a worker.")] = None,
    links: Annotated[str | None, typer.Option(help="Network between them: a preset, or a .toml file.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting, such as world.pause_every=600."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the summaries as JSON, nothing else on stdout.")] = False,
    out: Annotated[Path | None, typer.Option(help="New directory. Default: runs/simulate-DATE-TIME.")] = None,
) -> None:
    """Train many workers in this process on a virtual clock: messages, slow workers and pauses take their time."""
    from isles.cli.several import names, read_all, run_all, seeds_of, show
    from isles.training.config.reading import read_config

    end_in_order()
    flags = {"world.backend": "virtual", "world.links": links, "world.workers": workers, "run.steps": steps}
    own = read_config(config, flags, set_ or [], shared=methods is not None)
    if own.world.backend != "virtual":
        raise ValueError("isles simulate is always on the virtual clock: take world.backend out")
    chosen = [own.method] if methods is None else names(methods, "--methods")
    numbers = [own.run.seed] if seeds is None else seeds_of(seeds)
    folder, summaries = run_all(read_all(config, chosen, numbers, flags, set_ or []), out, "simulate")
    if json:
        print(json_module.dumps({"folder": str(folder), "runs": summaries}, indent=1))
    else:
        show(folder, summaries)
