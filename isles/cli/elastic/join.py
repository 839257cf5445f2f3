"""`isles join`: take part in a run that a lighthouse keeps."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from isles.cli.signals import end_in_order


def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the lighthouse is.")],
    token: Annotated[
        str | None, typer.Option("--token", metavar="TOKEN|@FILE", help="The run's, as shown there. Or ISLES_TOKEN.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Workers to start on this machine.")] = 1,
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Where the run's text lies on this machine, if not as there.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu or cuda: what this machine trains on, if not as there.")
    ] = None,
) -> None:
    """Join a run: the configuration comes from the lighthouse, the state from another worker. Ctrl-C leaves it after
    the round under way.
    """
    from isles.comm.credentials import parse_token
    from isles.training.elastic.entering import take_part

    end_in_order()
    text = token if token is not None else os.environ.get("ISLES_TOKEN")
    if not text:
        raise ValueError("--token is missing: give the one that the lighthouse shows, or ISLES_TOKEN, or --token @FILE")
    if workers < 1:
        raise ValueError(f"--workers {workers}: choose 1 or more")
    parsed = parse_token(text)
    if workers > 1:
        raise typer.Exit(_several(address, text, workers, data, device))
    print(take_part(address, parsed, data=data, device=device, tell=_tell), flush=True)


def _tell(line: str) -> None:
    print(f"isles: {line}", file=sys.stderr, flush=True)


def _several(address: str, token: str, workers: int, data: str | None, device: str | None) -> int:
    """Each in a process of its own, which hears Ctrl-C itself; the worst of their exit codes."""
    import subprocess

    command = [sys.executable, "-m", "isles", "join", address]
    command += [*(["--data", data] if data else []), *(["--device", device] if device else [])]
    environment = {**os.environ, "ISLES_TOKEN": Path(token[1:]).read_text().strip() if token[0] == "@" else token}
    started = [subprocess.Popen(command, env=environment) for _ in range(workers)]
    try:
        return max(process.wait() for process in started)
    except BaseException:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()
        raise
