"""`isles plan`: what a run would cost, before paying for it. Never loads torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from isles.network.links import Links
    from isles.report.sheet import Sheet


def plan(
    params: Annotated[str | None, typer.Option(help="Parameters of the model, such as 1.3B.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the model.")] = None,
    step_time: Annotated[str | None, typer.Option(help="Computing of one inner step, such as 0.8 or 800ms.")] = None,
    workers: Annotated[int | None, typer.Option(help="Workers.")] = None,
    links: Annotated[str | None, typer.Option(help="Network between them: a preset, or a .toml file.")] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Instead of --links: upload of a worker, as 200Mbit/s.")] = None,
    latency: Annotated[str | None, typer.Option(help="With --bandwidth: one way, such as 40ms. Default: 0.")] = None,
    sync_every: Annotated[int | None, typer.Option(help="H for all methods. Default: the least that will do.")] = None,
    targets: Annotated[str, typer.Option(help="Wanted shares of computing in percent, the decisive one first.")] = "90",
    tokens: Annotated[str | None, typer.Option(help="Tokens of the run, for hours; with --step-tokens.")] = None,
    step_tokens: Annotated[str | None, typer.Option(help="Tokens of one step of all workers together.")] = None,
    preset: Annotated[str | None, typer.Option(help="Instead: a calculation of the papers.")] = None,
    presets: Annotated[bool, typer.Option("--presets", help="List those.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write CSV, JSON, PNG and HTML into this directory.")] = None,
) -> None:
    """Say which method suits which link: time, bytes and memory of each, before a run. Or redo the papers' tables."""
    from isles.report.planning import presets as known
    from isles.report.planning import sheet

    run = {"--params": params, "--layers": layers, "--step-time": step_time, "--workers": workers}
    others = {"--links": links, "--bandwidth": bandwidth, "--latency": latency, "--sync-every": sync_every,
              "--tokens": tokens, "--step-tokens": step_tokens}  # fmt: skip
    given = [name for name, value in (run | others).items() if value is not None]
    if presets:
        if given or preset is not None or json or out is not None:
            raise ValueError("--presets lists what --preset takes: give it alone")
        width = max(map(len, known()))
        for name, what in known().items():
            print(f"{name:<{width}}  {what}")
        return
    if preset is not None:
        if given:
            raise ValueError(f"--preset {preset} has its own numbers: leave out {', '.join(given)}")
        made = sheet(preset)
    else:
        missing = [name for name, value in run.items() if value is None]
        missing += ["--links or --bandwidth"] if links is None and bandwidth is None else []
        if missing:
            raise ValueError(f"missing: {', '.join(missing)}; or give --preset NAME, one of {', '.join(known())}")
        network, name = _network(links, bandwidth, latency)
        made = _planned(run, network, name, sync_every, targets, tokens, step_tokens)
    _show(made, json, out)


def _planned(
    run: dict[str, Any],
    network: Links,
    name: str,
    sync_every: int | None,
    targets: str,
    tokens: str | None,
    step_tokens: str | None,
) -> Sheet:
    from isles.network.planner import Job
    from isles.network.units import parse_count, parse_seconds
    from isles.report.plan_sheet import plan_sheet

    job = Job(
        parameters=parse_count("--params", run["--params"]),
        layers=run["--layers"],
        step_seconds=parse_seconds("--step-time", run["--step-time"]),
        workers=run["--workers"],
        links=network,
        tokens=None if tokens is None else parse_count("--tokens", tokens),
        step_tokens=None if step_tokens is None else parse_count("--step-tokens", step_tokens),
    )
    return plan_sheet(job, name, targets=_shares(targets), every=sync_every)


def _network(links: str | None, bandwidth: str | None, latency: str | None) -> tuple[Links, str]:
    """The network, and its name in words."""
    from isles.network.links import Links
    from isles.network.links import links as named
    from isles.network.units import parse_rate, parse_seconds

    if links is not None:
        if bandwidth is not None or latency is not None:
            raise ValueError("--links says bandwidth and latency: leave out --bandwidth and --latency")
        return named(links), links
    assert bandwidth is not None
    seconds = parse_seconds("--latency", latency or 0.0)
    words = f"{bandwidth} up" + (f", {latency} one way" if latency else "")
    return Links(bandwidth=parse_rate("--bandwidth", bandwidth), latency=seconds), words


def _shares(text: str) -> list[float]:
    try:
        shares = [float(word) / 100 for word in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share < 1 for share in shares):
        raise ValueError(f"--targets {text}: write percents between 0 and 100, such as 90 or 90,50,99")
    return shares


def _show(made: Sheet, json: bool, out: Path | None) -> None:
    if json:
        from isles.report.sheet import as_json

        print(as_json(made))
    else:
        from isles.cli.table import print_table

        print(made.title, made.subtitle, made.what, "", sep="\n")
        print_table(made.table)
        print()
        for note in made.notes:
            print(f"note: {note}")
    if out is not None:
        from isles.report.sheet import write_sheet

        for path in write_sheet(made, out):
            print(path, file=sys.stderr if json else sys.stdout)
