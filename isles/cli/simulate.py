"""`isles simulate`: many workers on a simulated network, training for real on a virtual clock."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isles.cli.terminal import As, ConfigFile, InnerSteps, Set, end_in_order, takes_settings

if TYPE_CHECKING:
    from isles.cli.several import Configs, OnMetrics, OnNotice, Start
    from isles.training.config.sections import Config
    from isles.training.records.summary import SummaryTable


@takes_settings
def simulate(
    config: ConfigFile = None,
    methods: Annotated[
        str | None, typer.Option(help="Names, separated by commas. Default: the configuration's one.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, separated by commas. Default: the configuration's one.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Workers of every run.")] = None,
    steps: InnerSteps = None,
    links: Annotated[str | None, typer.Option(help="Network between them: a preset, or a .toml file.")] = None,
    churn: Annotated[
        str | None,
        typer.Option(
            metavar="RATE|POOL|FILE",
            help="Workers come and go: 10%/h, a pool (constant, doubling, halving, ramp-up, ramp-down), or a .jsonl.",
        ),
    ] = None,
    set_: Set = None,
    as_: As = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="CONFIG.toml is the directory of an elastic run: do it again, bit for bit.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summaries as JSON, nothing else on stdout.")] = False,
    out: Annotated[Path | None, typer.Option(help="New directory. Default: runs/simulate-DATE-TIME.")] = None,
) -> None:
    """Train many workers in this process on a virtual clock: messages, slow workers and pauses take their time."""
    from isles.cli.several import ComparisonRow, SharedSettings, read_all, rows_of, run_all, seeds_of, show
    from isles.training.config.reading import read_config

    end_in_order()
    if replay:
        others = {"--methods": methods, "--seeds": seeds, "--workers": workers, "--steps": steps, "--links": links}
        others |= {"--churn": churn, "--set": set_, "--as": as_}
        conflicting = [name for name, value in others.items() if value is not None]
        if conflicting:
            raise ValueError(f"{conflicting[0]} with --replay: what is done again is as it was; leave it out")
        _replay(config, out, as_json=json)
        return
    flags = {"world.backend": "virtual", "world.virtual.links": links, "world.workers": workers, "run.steps": steps}
    flags["run.priced_as"] = as_
    own = read_config(config, flags, set_ or [], shared=methods is not None)
    if own.world.backend != "virtual":
        raise ValueError("isles simulate is always on the virtual clock: take world.backend out")
    chosen = [ComparisonRow(own.method)] if methods is None else rows_of(methods)
    numbers = [own.run.seed] if seeds is None else seeds_of(seeds)
    configs, start = read_all(SharedSettings(config, flags, set_ or []), chosen, numbers), None
    if churn is not None:
        configs, start = _simulate_churn(churn, configs)
    folder, summaries = run_all(configs, out, "simulate", start)
    if json:
        print(json_module.dumps({"folder": str(folder), "runs": summaries}, indent=1))
    else:
        show(folder, summaries)


def _replay(run: str | None, out: Path | None, *, as_json: bool) -> None:
    """Do an elastic run again from its record, and say whether the weights are the same."""
    from isles.training.config.reading import read_config
    from isles.training.elastic.replay import repeat
    from isles.training.lighthouse.mean import same_weights

    if run is None or not Path(run).is_dir():
        raise ValueError("--replay: name the directory of a run of isles lighthouse, or of isles simulate --churn")
    folder = Path(run)
    made = out or folder / "replayed.safetensors"
    workers = repeat(
        read_config(str(folder / "config.toml"), {}, []), folder, made, lambda text: print(text, file=sys.stderr)
    )
    before = folder / "model.safetensors"
    same = same_weights(before, made) if before.is_file() else None
    if as_json:
        print(json_module.dumps({"workers": workers, "model": str(made), "same": same}))
    else:
        verdicts = {True: "the same weights as", False: "other weights than", None: "there is no"}[same]
        print(f"replayed: the mean of workers {', '.join(map(str, workers))} is in {made}; {verdicts} {before}")
    if same is False:
        raise typer.Exit(1)


def _simulate_churn(name: str, configs: Configs) -> tuple[Configs, Start]:
    """The same where workers come and go, and what starts them; all that can be refused is, before the first begins."""
    from isles.training.elastic.support import going_on
    from isles.training.kinds import kind_of
    from isles.training.simulated_churn import trace_of

    kinds = {type(kind_of(config.pipeline)): config.pipeline.routing for config in configs.values()}
    if len(kinds) > 1:
        names = ", ".join(sorted(kinds.values()))
        raise ValueError(f"--churn: runs by pipeline.routing = {names}: simulate each by itself")
    kind = next(iter(kinds))()
    if not kind.has_peers:
        configs = {key: going_on(config) for key, config in configs.items()}
    for config in configs.values():
        trace_of(config, name)
    made = kind.simulated_run

    def begin(config: Config, folder: Path, on_metrics: OnMetrics, on_notice: OnNotice) -> SummaryTable:
        return made(config, name, folder, on_metrics, on_notice).run()

    return configs, begin
