"""`isles simulate`: many workers on a simulated network, training for real on a virtual clock."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isles.cli.signals import end_in_order

if TYPE_CHECKING:
    from isles.cli.several import Configs, OnLine, OnNotice
    from isles.training.config.sections import Config
    from isles.training.running.run import SummaryTable


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
    churn: Annotated[
        str | None,
        typer.Option(
            metavar="RATE|POOL|FILE",
            help="Workers come and go: 10%/h, a pool (constant, doubling, halving, ramp-up, ramp-down), or a .jsonl.",
        ),
    ] = None,
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
    if churn is None:
        folder, summaries = run_all(read_all(config, chosen, numbers, flags, set_ or []), out, "simulate")
    else:
        folder, summaries = _churned(churn, read_all(config, chosen, numbers, flags, set_ or []), out)
    if json:
        print(json_module.dumps({"folder": str(folder), "runs": summaries}, indent=1))
    else:
        show(folder, summaries)


def _churned(name: str, configs: Configs, out: Path | None) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    """The same where workers come and go; all that can be refused is, before the first begins."""
    from isles.cli.several import run_all
    from isles.training.elastic.churned import ChurnedRun, trace_of
    from isles.training.elastic.terms import going_on

    if any(config.pipeline.routing == "swarm" for config in configs.values()):
        return _swarms(name, configs, out)
    elastic = {place: going_on(config) for place, config in configs.items()}
    for config in elastic.values():
        trace_of(config, name)

    def begin(config: Config, folder: Path, on_line: OnLine, on_notice: OnNotice) -> SummaryTable:
        return ChurnedRun(config, name, folder, on_line, on_notice).run()

    return run_all(elastic, out, "simulate", begin)


def _swarms(name: str, configs: Configs, out: Path | None) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    """The same with swarms, all of them."""
    from isles.cli.several import run_all
    from isles.training.swarmed.churned import ChurnedSwarm

    if any(config.pipeline.routing != "swarm" for config in configs.values()):
        raise ValueError("--churn: swarms and other runs at once: simulate them one after the other")

    def begin(config: Config, folder: Path, on_line: OnLine, on_notice: OnNotice) -> SummaryTable:
        return ChurnedSwarm(config, name, folder, on_line, on_notice).run()

    return run_all(configs, out, "simulate", begin)
