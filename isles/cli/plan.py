"""`isles plan`: what a run would cost, before paying for it. Never loads torch."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from isles.cli.plan_job import Asked
    from isles.report.sheet import Sheet


def plan(
    context: typer.Context,
    params: Annotated[str | None, typer.Option(help="Parameters of the model, such as 1.3B.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the model.")] = None,
    step_time: Annotated[str | None, typer.Option(help="Computing of one inner step, such as 0.8 or 800ms.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Instead of --step-time: one a worker, such as A100.")] = None,
    mfu: Annotated[float | None, typer.Option(help="With --gpu: share of its peak reached. Default 0.4.")] = None,
    workers: Annotated[int | None, typer.Option(help="Workers.")] = None,
    like: Annotated[str | None, typer.Option(metavar="RUN", help="Model, step and workers of a finished run.")] = None,
    links: Annotated[str | None, typer.Option(help="Network between them: a preset, or a .toml file.")] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Instead of --links: upload of a worker, as 200Mbit/s.")] = None,
    latency: Annotated[str | None, typer.Option(help="With --bandwidth: one way, such as 40ms. Default 0.")] = None,
    probe: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Instead: measure the line to a machine that --listens.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="[HOST:]PORT", help="Only answer another machine's --probe, for ten minutes."),
    ] = None,
    sync_every: Annotated[int | None, typer.Option(help="H for all methods. Default: the least that will do.")] = None,
    targets: Annotated[
        str | None, typer.Option(help="Wanted shares of computing in percent, the decisive one first. Default 90.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens of the run, for hours; with --step-tokens.")] = None,
    step_tokens: Annotated[str | None, typer.Option(help="Tokens of one step of all workers together.")] = None,
    stages: Annotated[
        str | None, typer.Option(help="Split workers into replicas of so many stages: auto, or such as 2,4,8.")
    ] = None,
    routing: Annotated[str | None, typer.Option(help="With --stages: fixed or random routes. Default fixed.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="With --stages: of a replica's batch. Default 4.")] = None,
    method: Annotated[str | None, typer.Option(help="With --stages: between replicas. Default diloco.")] = None,
    inner_links: Annotated[
        str | None, typer.Option(help="With --stages: network inside a replica. Default: as between.")
    ] = None,
    boundary: Annotated[
        str | None, typer.Option(help="With --stages: what crosses between them, such as subspace:40 or dct:0.9.")
    ] = None,
    boundary_codec: Annotated[
        str | None, typer.Option(help="With --stages: its form, such as int8, both ways.")
    ] = None,
    subspace_update: Annotated[
        int | None, typer.Option(help="With --boundary subspace:K: steps after which it is turned. Default never.")
    ] = None,
    churn: Annotated[
        str | None, typer.Option(metavar="RATE", help="Workers come and go, such as 10%/h: what that costs.")
    ] = None,
    compare_parallel: Annotated[
        bool, typer.Option("--compare-parallel", help="Instead of methods: out of core, cut into stages, or sharded.")
    ] = False,
    machine: Annotated[
        str | None, typer.Option(help="With --compare-parallel: a known machine, or a .toml file of one.")
    ] = None,
    per_host: Annotated[int | None, typer.Option(help="With --compare-parallel: devices of a host. Default 1.")] = None,
    sequence: Annotated[int | None, typer.Option(help="With --compare-parallel: its tokens. Default 1024.")] = None,
    preset: Annotated[str | None, typer.Option(help="Instead: a calculation of the papers.")] = None,
    presets: Annotated[bool, typer.Option("--presets", help="List those.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write CSV, JSON, PNG and HTML into this directory.")] = None,
    write: Annotated[Path | None, typer.Option(help="Also write the first line as a new CONFIG.toml.")] = None,
) -> None:
    """Say which method suits which link: time, bytes and memory of each, before a run. Or redo the papers' tables."""
    from isles.cli.plan_job import Asked
    from isles.report.sheets.presets import presets as known
    from isles.report.sheets.presets import sheet

    asked = Asked(**{option.name: context.params[option.name] for option in fields(Asked)})
    if listen is not None:
        if asked.given or preset is not None or presets or json or out is not None or write is not None:
            raise ValueError("--listen answers another machine, which does the planning: give it alone")
        _answer(listen)
        return
    if presets:
        if asked.given or preset is not None or json or out is not None or write is not None:
            raise ValueError("--presets lists what --preset takes: give it alone")
        width = max(map(len, known()))
        for name, what in known().items():
            print(f"{name:<{width}}  {what}")
        return
    if preset is not None:
        if asked.given or compare_parallel or write is not None:
            extra = [
                *asked.given,
                *(["--compare-parallel"] if compare_parallel else []),
                *(["--write"] if write is not None else []),
            ]
            raise ValueError(f"--preset {preset} has its own numbers: leave out {', '.join(extra)}")
        _show(sheet(preset), json, out)
        return
    if compare_parallel:
        _compare_parallel(asked, json, out, write)
        return
    if extra := [option for option in asked.given if option in ("--machine", "--per-host", "--sequence")]:
        raise ValueError(f"{', '.join(extra)}: of --compare-parallel; give that too, or --gpu for a worker's GPU")
    if stages is not None:
        _plan_stages(asked, json, out, write)
        return
    only = ("--routing", "--microbatches", "--method", "--inner-links")
    only += ("--boundary", "--boundary-codec", "--subspace-update")
    if extra := [option for option in asked.given if option in only]:
        raise ValueError(f"{', '.join(extra)}: of replicas in stages; give --stages too")
    _plan(asked, json, out, write)


def _plan_stages(asked: Asked, json: bool, out: Path | None, write: Path | None) -> None:
    from isles.cli.plan_job import job_of, stages_of
    from isles.pipeline.planning import plan_splits
    from isles.report.sheets.splits import splits_sheet

    extra = [*(["--write"] if write is not None else []), *(["--targets"] if asked.targets is not None else [])]
    extra += ["--churn"] if asked.churn is not None else []
    if extra:
        raise ValueError(f"--stages plans splits of the workers: leave out {', '.join(extra)}")
    job, network = job_of(asked)
    wanted, found = stages_of(asked, job)
    _show(splits_sheet(wanted, plan_splits(wanted, found), network), json, out)


def _compare_parallel(asked: Asked, json: bool, out: Path | None, write: Path | None) -> None:
    from isles.cli.plan_job import parallel_job_of
    from isles.report.sheets.parallel import parallel_sheet

    if write is not None:
        raise ValueError("--write: a configuration is written of methods; leave it out with --compare-parallel")
    job, network = parallel_job_of(asked)
    _show(parallel_sheet(job, network), json, out)


def _plan(asked: Asked, json: bool, out: Path | None, write: Path | None) -> None:
    from isles.cli.plan_job import churn_of, config_of, job_of
    from isles.network.planner import planner
    from isles.report.sheets.churn import with_churn
    from isles.report.sheets.plan import plan_sheet

    if write is not None and write.exists():
        raise ValueError(f"--write {write}: exists already; name a new file")
    shares = _shares("90" if asked.targets is None else asked.targets)
    churn = None if asked.churn is None else churn_of(asked.churn)
    job, network = job_of(asked)  # after all that can be refused at once: it may measure
    plans = planner.plan(job, targets=shares, every=asked.sync_every)
    made = plan_sheet(job, plans, network, targets=shares)
    _show(made if churn is None else with_churn(made, job, plans, churn), json, out)
    if write is not None:
        try:
            write.write_text(config_of(job, plans[0], network), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--write {write}: cannot be written ({error.strerror}); name another file") from error
        print(write, file=sys.stderr if json else sys.stdout)


def _answer(place: str) -> None:
    """The other end of --probe."""
    from isles.cli.doctor import LISTEN_FOR, rates_in_words, say_waiting
    from isles.launch.addresses import listen as open_port
    from isles.launch.addresses import listening_place, written
    from isles.launch.probe import wait_for_call

    host, port = listening_place(place)
    with open_port(port, host) as listener:
        say_waiting(f"isles plan --probe {written(host, port)} ...")
        found = wait_for_call(listener, LISTEN_FOR, lambda text: print(text, file=sys.stderr, flush=True))
    print(f"measured with {found.there}: {rates_in_words(found)}")


def _shares(text: str) -> list[float]:
    try:
        shares = [float(word) / 100 for word in text.split(",")]
    except ValueError:
        shares = []
    if any(0 < share < 0.01 for share in shares):
        percent = ",".join(f"{1e4 * share:g}" for share in shares)
        raise ValueError(f"--targets {text}: these are percents: write {percent}, or shares above 1 %")
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
