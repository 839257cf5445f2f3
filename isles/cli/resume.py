"""`isles resume RUN`: go on where a run stopped."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from isles.cli.train import run as run_with_progress


def resume(
    run: Annotated[Path, typer.Argument(help="Directory of a run that was interrupted or broke off.")],
    workers: Annotated[
        int | None, typer.Option(help="Go on with so many workers; says what is kept and lost. Default: as before.")
    ] = None,
) -> None:
    """Go on from the newest checkpoint of a run; with as many workers, to the same result as if it had not stopped."""
    from isles.training.regroup import prepare
    from isles.training.server import start_server

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if (run / "summary.json").exists():
        raise ValueError(f"{run}: this run is complete; there is nothing to resume")
    start_server()
    ready = prepare(run, workers)
    for note in ready.notes:
        print(note, file=sys.stderr)
    print(f"resuming {run} after step {ready.step}", file=sys.stderr)
    run_with_progress(ready.config, run, resume=ready.step)
