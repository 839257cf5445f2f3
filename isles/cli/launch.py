"""`isles launch slurm`: a batch script for a cluster."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from isles.cli.terminal import Set

app = typer.Typer(help="Write a script that starts a run on a cluster.", no_args_is_help=True)

_WARNING = 120  # seconds before the end of the job's time: to finish a step, to agree on it and to write a checkpoint
_STOPPED = 130  # the exit code of a run that has saved and ended
_SCRIPT = """\
#!/bin/bash
{options}
# A task is a worker. Before the job's time is over Slurm sends SIGUSR1 (--signal): the run saves a checkpoint and ends
# with exit code {stopped}, or with 138 before it has begun. The job then queues again, and goes on.
srun {command}
code=$?
if [ "$code" -eq {stopped} ] || [ "$code" -eq 138 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@app.command("slurm")
def slurm(
    config: Annotated[str, typer.Argument(metavar="CONFIG.toml", help="The run.")],
    nodes: Annotated[int, typer.Option(help="Machines.", min=1)],
    workers_per_node: Annotated[
        int | None, typer.Option(help="Tasks a machine. Default: world.workers over --nodes.", min=1)
    ] = None,
    time: Annotated[str | None, typer.Option(help="Time of a job, such as 4:00:00. Default: the partition's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run directory. Default: runs/ and CONFIG's name.")] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Such as partition=gpu, gpus-per-task=1; repeatable.")
    ] = None,
    set_: Set = None,
) -> None:
    """Print a script for sbatch: a run, a task a worker, that saves, queues again and goes on when its time is over."""
    from isles.training.config.reading import gather, resolve

    tables = gather(config, {}, set_ or [])
    each, rest = divmod(tables["world"]["workers"], nodes) if workers_per_node is None else (workers_per_node, 0)
    if rest or not each:
        raise ValueError(
            f"--nodes {nodes}: world.workers = {tables['world']['workers']} is no multiple; name --workers-per-node"
        )
    made = resolve({**tables, "world": {**tables["world"], "workers": nodes * each}})  # ValueError before it is queued
    if not made.world.has_processes:
        raise ValueError(f'world.backend = "{made.world.backend}" needs one process: submit isles simulate yourself')
    name, own = Path(config).stem, {key: value for key, _, value in (one.partition("=") for one in sbatch or [])}
    options = {"job-name": name, "nodes": nodes, "ntasks-per-node": each, **({"time": time} if time else {})}
    options |= {"requeue": "", "open-mode": "append", "output": f"{name}-%j.log", "signal": f"USR1@{_WARNING}", **own}
    lines = [f"#SBATCH --{key}{'=' if value else ''}{value}".rstrip() for key, value in options.items()]
    command = [sys.executable, "-m", "isles", "train", config, *(word for one in set_ or [] for word in ("--set", one))]
    command += ["--out", str(out or Path("runs") / name), "--resume", "auto"]
    print(_SCRIPT.format(options="\n".join(lines), command=shlex.join(command), stopped=_STOPPED), end="")
