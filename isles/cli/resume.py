"""`isles resume RUN`: go on where a run stopped."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from isles.cli import torchrun
from isles.cli.train import Node, Nodes, Rendezvous
from isles.cli.train import run as run_with_progress


def resume(
    run: Annotated[Path, typer.Argument(help="Directory of a run that was interrupted or broke off.")],
    nodes: Nodes = 1,
    node: Node = 0,
    rendezvous: Rendezvous = "",
) -> None:
    """Go on from the newest checkpoint of a run, with the same workers, to the same result as if it had not stopped."""
    from isles.comm.party import Place
    from isles.training.border import read_config
    from isles.training.checkpoint import Checkpoints
    from isles.training.server import start_server

    place = Place(nodes=nodes, node=node, rendezvous=rendezvous)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if (run / "summary.json").exists():
        raise ValueError(f"{run}: this run is complete; there is nothing to resume")
    steps = Checkpoints(run).steps()
    if not steps:
        raise ValueError(f"{run}: no whole checkpoint there; set run.checkpoint_every, or start again")
    if torchrun.size() is None:
        start_server()
    config = read_config(str(run / "config.toml"), {}, [])
    torchrun.check(config.world.workers)
    if torchrun.speaks():
        print(f"resuming {run} after step {steps[-1]}", file=sys.stderr)
    run_with_progress(config, lambda: run, place, resume=steps[-1])
