"""`isles resume RUN`: go on where a run stopped."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from isles.cli import torchrun
from isles.cli.terminal import OwnDevice, Trust, end_in_order
from isles.cli.train import Node, Nodes, Rendezvous, TokenText, report_device
from isles.cli.train import run as run_with_progress


def resume(
    run: Annotated[Path, typer.Argument(help="Directory of a run that was interrupted or broke off.")],
    workers: Annotated[
        int | None, typer.Option(help="Continue with this many workers; prints what changes. Default: as before.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Go back to the checkpoint of this inner step. Default: the newest.")
    ] = None,
    stages: Annotated[
        int | None, typer.Option(help="Go on with each replica in so many stages, the same bits by name.")
    ] = None,
    device: OwnDevice = None,
    nodes: Nodes = 1,
    node: Node = 0,
    rendezvous: Rendezvous = "",
    token: TokenText = None,
    trust: Trust = False,
) -> None:
    """Go on from the newest checkpoint of a run; with as many workers, to the same result as if it had not stopped.

    A run whose workers come and go: its lighthouse restarts at the same address, with as many workers here as before.
    """
    from isles.cli.elastic.lighthouse import restart_lighthouse
    from isles.launch.nodes import NodeSpec
    from isles.training.records.tokens import read_token

    node_spec = NodeSpec(nodes=nodes, node=node, rendezvous=rendezvous, token=read_token(token, nodes))
    end_in_order()
    if (run / "summary.json").exists():
        raise ValueError(f"{run}: this run is complete; there is nothing to resume")
    if (run / "members.jsonl").exists():
        if (step, stages, device, nodes) != (None, None, None, 1):
            raise ValueError(f"{run}: its workers come and go: leave --step, --stages, --device and --nodes out")
        restart_lighthouse(run, workers)
        return
    if (workers, stages) != (None, None) and (node_spec.nodes > 1 or torchrun.size() is not None):
        option = f"--stages {stages}" if workers is None else f"--workers {workers}"
        raise ValueError(
            f"{option}: the states of all workers must lie in one directory, and one process changes them; "
            "do it without --nodes and torchrun"
        )
    from isles.running.backends import start_server
    from isles.training.records.reshard import prepare

    if torchrun.size() is None:
        start_server()
    ready = prepare(run, workers, stages, step, trust=trust)
    torchrun.check(ready.config.world.workers)
    if torchrun.is_main_process():
        for note in (*ready.notes, f"resuming {run} after step {ready.step}"):
            print(note, file=sys.stderr)
    config = ready.config if device is None else replace(ready.config, model=replace(ready.config.model, device=device))
    report_device(config, nodes, node)
    run_with_progress(config, lambda: run, node_spec, resume=ready.step)
