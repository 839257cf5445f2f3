"""The commands of `isles plan`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from isles.cli.plans import clusters, memory, methods, paths
from isles.cli.terminal import AsJson, OutFolder, print_named, show


def plan_parallel(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Parameters and layers: '1.3B, 24 layers'.")],
    workers: Annotated[int, typer.Option(help="Devices, a worker each.")],
    machine: Annotated[str, typer.Option(help="What each host is: a known machine, or a .toml file of one.")],
    step_tokens: Annotated[str, typer.Option(help="Tokens of one step of all workers together.")],
    links: Annotated[str, typer.Option(help="Network between hosts: a preset, '1Gbit/s, 1ms', or a .toml file.")],
    inner_links: Annotated[str | None, typer.Option(help="Network inside a host. Default: as between.")] = None,
    per_host: Annotated[int, typer.Option(help="Devices of a host.")] = 1,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 1024,
    json: AsJson = False,
    out: OutFolder = None,
) -> None:
    """Compare ways to train one model on equal devices: out of core, sharded, or cut into stages."""
    from isles.cli.plans.methods import model_of
    from isles.models.sizes import parameters
    from isles.network.links import links as named
    from isles.network.machines import machine as named_machine
    from isles.network.units import parse_count
    from isles.papers.memory_parallel import ParallelJob, decoder_like
    from isles.papers.memory_parallel_sheet import parallel_sheet

    tokens = parse_count("--step-tokens", step_tokens)
    if sequence < 1 or per_host < 1:
        raise ValueError("--sequence and --per-host: choose 1 or more")
    if tokens % sequence:
        raise ValueError(
            f"--step-tokens {step_tokens}: {tokens:.0f} tokens are no whole number of sequences of {sequence}"
        )
    whole, shape, between = named_machine(machine), model_of(model).shape(), named(links)
    near = between if inner_links is None else named(inner_links)
    job = ParallelJob(
        shape=decoder_like(parameters(shape), shape.layers, sequence),
        devices=workers,
        per_host=per_host,
        machine=replace(whole, host_bytes=whole.host_bytes / per_host, host_update=whole.host_update / per_host),
        sequences=round(tokens / sequence),
        link=between.way_rate(0, 1) / 8,
        near=near.way_rate(0, 1) / 8,
    )
    show(parallel_sheet(job, links), json, out)


def explain(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Which; without it they are listed.")] = None,
    json: AsJson = False,
    out: OutFolder = None,
) -> None:
    """Redo a table or a figure of the papers: what stands behind it, and our numbers."""
    from isles.papers.calculations import presets, sheet

    if name is not None:
        show(sheet(name), json, out)
        return
    if json or out is not None:
        raise ValueError("missing: NAME; isles plan explain, alone, lists them")
    print_named(presets())


app = typer.Typer(
    help="Plan a run before it starts: method, splits, memory, paths, clusters.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("methods")(methods.plan_methods)
app.command("splits")(methods.plan_splits)
app.command("memory")(memory.plan_memory)
app.command("parallel")(plan_parallel)
app.command("paths")(paths.plan_paths)
app.command("check")(paths.check)
app.command("replan")(paths.replan)
app.command("clusters")(clusters.plan_clusters)
app.command("explain")(explain)
