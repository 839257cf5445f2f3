"""`isles train`: the main job. Starts the workers, shows progress, ends with a table, the bytes, and the report's
path.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isles.cli import torchrun
from isles.cli.terminal import (
    As,
    ConfigFile,
    InnerSteps,
    Log,
    Progress,
    Set,
    Trust,
    end_in_order,
    log_event,
    say,
    takes_settings,
)
from isles.report import write_report
from isles.report.units import format_bytes, format_seconds

Nodes = Annotated[int, typer.Option(help="Machines that train together; the same command on each.")]
Node = Annotated[int, typer.Option(help="Which of them this is, from 0.")]
Rendezvous = Annotated[str, typer.Option(metavar="HOST:PORT", help="Where node 0 listens for the others.")]
TokenText = Annotated[
    str | None,
    typer.Option("--token", metavar="TOKEN|@FILE", help="The run's secret, shown by node 0. Or ISLES_TOKEN."),
]

if TYPE_CHECKING:
    from isles.launch.nodes import NodeSpec
    from isles.training.config.sections import Config
    from isles.training.records.reshard import Resumption


@takes_settings
def train(
    config: ConfigFile = None,
    method: Annotated[
        str | None, typer.Option(help="none, ddp, localsgd, diloco, noloco, or package.module:Class.")
    ] = None,
    workers: Annotated[
        str | None, typer.Option(metavar="N|auto", help="Worker processes. Default, auto: one a GPU; 4 without GPUs.")
    ] = None,
    steps: InnerSteps = None,
    set_: Set = None,
    preset: Annotated[
        str | None, typer.Option(help="A named configuration instead of CONFIG.toml: see isles config --presets.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New run directory. Default: runs/METHOD-DATE-TIME.")] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="auto", help="auto: go on with the run that --out holds, if any; nothing if complete."),
    ] = None,
    nodes: Nodes = 1,
    node: Node = 0,
    rendezvous: Rendezvous = "",
    token: TokenText = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what the run will be: memory, who sends what when, bytes, time.")
    ] = False,
    gpu: Annotated[str, typer.Option(help="With --dry-run: whether it fits this machine, such as H100.")] = "",
    probe: Annotated[bool, typer.Option("--probe", help="With --dry-run: measure a step on this machine.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
    as_: As = None,
    log: Log = "text",
    trust: Trust = False,
) -> None:
    """Train a model; without CONFIG.toml a small one on the standard library's own source, with NoLoCo."""
    if (probe or json or gpu) and not dry_run:
        option = "--probe" if probe else "--json" if json else "--gpu"
        raise ValueError(f"{option} goes with --dry-run: add it, or take it out")
    if dry_run and log == "json":
        raise ValueError("--log json is of a run: with --dry-run, --json prints the plan")
    if resume not in (None, "auto"):
        raise ValueError(f"--resume {resume}: write --resume auto, or isles resume {resume}")
    if resume and (out is None or nodes > 1):
        why = "name the run directory with --out" if out is None else "--nodes has a directory a machine; start by srun"
        raise ValueError(f"--resume auto: {why}")
    from isles.launch.nodes import NodeSpec
    from isles.running.python import new_directory, ready
    from isles.training.config.reading import gather, resolve
    from isles.training.records.tokens import node_token, read_token

    node_spec = NodeSpec(nodes=nodes, node=node, rendezvous=rendezvous, token=read_token(token, nodes))
    if nodes == 1:
        torchrun.adopt()
    if node > 0 and node_spec.token is None and not dry_run:
        node_token(out or Path(), None)  # refuses before torch is loaded
    if preset is not None:
        from isles.training.config.presets import preset_file

        if config is not None:
            raise ValueError(f"--preset {preset} stands where {config} does: give one of the two")
        config = str(preset_file(preset))
    end_in_order()
    flags = {"replicas.method": method, "world.workers": torchrun.workers(workers), "run.steps": steps}
    flags["run.priced_as"] = as_
    tables = gather(config, flags, set_ or [], trust=trust, machines=nodes)
    resolved = resolve(tables) if dry_run or torchrun.size() is not None else ready(tables, nodes)
    if dry_run:
        from isles.cli.plan_printer import show

        if torchrun.is_main_process():
            show(resolved, probe=probe, as_json=json, machines=nodes, machine=gpu)
        return
    if out is not None and nodes == 1 and (resume or torchrun.restarts()) and (out / "config.toml").exists():
        if (found := _found(out, resolved, trust=trust)) is None:
            return
        if found.step:
            return go_on(found, out, node_spec)
    torchrun.note_other_workers(config)
    file = f"{preset or config} over the defaults of isles config --method {resolved.method}"
    report_device(resolved, nodes, node, f"; settings: {'the built-in small run' if config is None else file}")
    run(resolved, lambda: out or new_directory(resolved.method), node_spec)


def _found(out: Path, config: Config, *, trust: bool) -> Resumption | None:
    """The run that `out` holds, ready to go on; of step 0 if it must begin again; None if it is complete. ValueError if
    it is not a run of `config`.
    """
    from isles.running.agree import described, differences
    from isles.training.config.reading import read_config
    from isles.training.records.checkpoint import Checkpoints
    from isles.training.records.reshard import Resumption, prepare
    from isles.training.records.rundir import discard_beginning

    if (out / "members.jsonl").exists():
        raise ValueError(f"--out {out}: holds a run whose workers come and go; go on with isles resume {out}")
    there = described(read_config(str(out / "config.toml"), {}, [], trust=trust))
    if different := differences(described(config), there, "here"):
        raise ValueError(f"--out {out}: holds another run ({different}); name another directory, or use isles resume")
    if (out / "summary.json").exists():
        if torchrun.is_main_process():
            say(f"{out}: this run is complete")
        return None
    if Checkpoints(out).steps():
        return prepare(out, None, trust=trust, shared=torchrun.size() is not None)
    if torchrun.is_main_process():
        discard_beginning(out)
    return Resumption(config, 0, [])


def go_on(ready: Resumption, out: Path, node_spec: NodeSpec) -> None:
    """Run on from a checkpoint of the run in `out`."""
    if torchrun.is_main_process():
        for note in (*ready.notes, f"resuming {out} after step {ready.step}"):
            say(note)
    report_device(ready.config, node_spec.nodes, node_spec.node)
    run(ready.config, lambda: out, node_spec, resume=ready.step)


def run(config: Config, choose: Callable[[], Path], node_spec: NodeSpec, resume: int | None = None) -> None:
    """Launch, with live progress, and print how it ended. choose: names the run directory, once."""
    from isles.launch.nodes import split
    from isles.running.follow import follow
    from isles.running.run import Interrupted, launch

    out = None
    try:
        if torchrun.size() is not None:
            return torchrun.run(config, choose, node_spec, resume, print_summary)
        out = choose()
        if node_spec.node == 0:
            with Progress(config.method, config.world.workers, config.run.steps) as progress:
                summary = launch(config, out, progress.line, progress.notice, resume, node_spec)
            print_summary(summary, out)
        else:
            own = len(split(config.world.workers, node_spec.nodes)[node_spec.node])
            title = f"{config.method}, workers of node {node_spec.node}:"  # and of no other
            with Progress(title, own, config.run.steps, plain=f"node {node_spec.node}: ") as progress:
                host = follow(config, out, progress.line, progress.notice, resume, node_spec)
            done = f"done; the model and its report are on node 0 ({host})"
            log_event("end", text=done) or print(done)
    except Interrupted as stop:
        if torchrun.is_main_process():
            say(str(stop), "warning", "isles: ")
        raise typer.Exit(130) from None
    except KeyboardInterrupt:
        if torchrun.is_main_process():
            say(_at_once(out, node_spec), "warning", "isles: ")
        raise typer.Exit(130) from None


def report_device(config: Config, nodes: int = 1, node: int = 0, more: str = "") -> None:
    """The line that says where the workers of this machine train."""
    from isles.launch.nodes import split
    from isles.models.factory import placement

    own = len(split(config.world.workers, nodes)[node])
    line = placement(config.model, int(os.environ.get("LOCAL_WORLD_SIZE", own)))
    if torchrun.is_main_process():
        say(f"device: {line}{more}")


def _at_once(out: Path | None, node_spec: NodeSpec) -> str:
    """What is left of a run that was ended without waiting for a step."""
    from isles.training.records.checkpoint import Checkpoints

    steps = [] if out is None else Checkpoints(out).steps()
    if not steps:
        return "ended at once; no step was saved"
    return f"ended at once; saved after step {steps[-1]}, go on with: isles resume {out}{node_spec.flags}"


def print_summary(summary: dict[str, Any], out: Path) -> None:
    """Write the report of the run in `out`, and print what the run came to."""
    from rich.console import Console
    from rich.table import Table

    page = write_report(out)
    if log_event("end", run=str(out), report=str(page), **summary):
        return
    layout = f" in {summary['islands']} islands" if "islands" in summary else ""
    if "stages" in summary:
        count, stages = summary["replicas"], summary["stages"]
        uneven = "up to " if summary["workers"] < count * stages else ""
        layout = f", {count} replica{'s' * (count > 1)} of {uneven}{stages} stages"
    layout += f", {summary['steps']} steps" + (f", priced as {summary['priced_as']}" if "priced_as" in summary else "")
    table = Table(title=f"{summary['method']}: {summary['workers']} workers{layout}", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for label, value in summary_rows(summary):
        table.add_row(label, value)
    Console().print(table)
    print(f"run     {out}", f"report  {page}", sep="\n", flush=True)


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """What the table at the end of a run says."""
    sent, ddp = summary["bytes_sent_per_worker"], summary["ddp_bytes_per_worker"]
    across = summary.get("bytes_across_per_worker")
    between = summary["channels"].get("outer", {}).get("bytes_sent") if "stages" in summary and not across else None
    rows = []
    if summary["val_loss"] is not None:
        rows = [
            ("validation loss, mean of replicas", f"{summary['val_loss_replicas']:.4f} nats/token"),
            ("validation loss, consolidated model", f"{summary['val_loss']:.4f} nats/token"),
        ]
        rows += [(f"  on {k[9:]}", f"{x:.4f} nats/token") for k, x in summary.items() if k.startswith("val_loss.")]
        if summary["val_loss"] < 100:  # of a model that blew up it says nothing
            rows.append(("  as perplexity", f"{math.exp(summary['val_loss']):.2f}"))
    rows += [
        ("spread of replicas", f"{summary['replica_std']:.2e}"),
        ("tokens, all workers", f"{summary['tokens']:,}"),
        ("sent per worker", format_bytes(sent)),
        *([("  as priced", format_bytes(summary["priced_bytes_per_worker"]))] if "priced_as" in summary else []),
        *([] if across is None else [("  of that across islands", format_bytes(across))]),
        *([] if not between else [("  of that to other replicas", format_bytes(between))]),
        ("data parallel would have sent", format_bytes(ddp) + (f" ({ddp / sent:.1f} x)" if sent else "")),
        ("compute utilisation", f"{100 * summary['compute_utilisation']:.1f} %"),
        ("training", format_seconds(summary["train_seconds"])),
    ]
    if "pipeline_bubble" in summary:
        rows.insert(-1, ("  waiting for other stages", f"{100 * summary['pipeline_bubble']:.1f} %"))
    if summary["virtual_seconds"] is not None:
        rows.append(("virtual clock", format_seconds(summary["virtual_seconds"])))
    return rows
