"""`torchrun --nproc-per-node 4 -m isles train ...`, `srun -n 4 isles train ...`, mpirun: each process that one of them
has started is a worker, and rank 0 talks to the user.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isles.base.tables import read_toml
from isles.cli.terminal import Progress, say

if TYPE_CHECKING:
    from isles.launch.nodes import NodeSpec
    from isles.training.config.sections import Config

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def adopt() -> None:
    """Set torchrun's variables in a process that srun or mpirun started with others. ValueError for half of them."""
    from isles.comm.environment import world_variables

    if size() is None and (world := world_variables(os.environ)) is not None:
        os.environ.update(world)


def _starter() -> str:
    """What has started this process, and the option that says how many."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun started {} processes: start {} (--nproc-per-node times --nnodes)"
    return "{} were started together: start {} (srun -n, mpirun -n)"


def size() -> int | None:
    """How many processes were started together by torchrun, or by what `adopt` knows; None: a usual command."""
    return int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in _VARIABLES) else None


def restarts() -> bool:
    """Whether torchrun (--max-restarts) or Slurm (--requeue) has started this command before."""
    return any(os.environ.get(name, "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def is_main_process() -> bool:
    """Whether this process is the one that talks to the user."""
    return size() is None or os.environ["RANK"] == "0"


def workers(text: str | None) -> int | str | None:
    """What --workers stands for: the number `text`, "auto", or that of processes. ValueError where they differ."""
    if text is None or text == "auto":
        return text if size() is None else size()
    if not text.isdecimal():
        raise ValueError(f"--workers {text}: write 1 or more, or auto")
    check(int(text))
    return int(text)


def check(wanted: int) -> None:
    """ValueError where another number of processes was started than `wanted`."""
    if size() not in (None, wanted):
        raise ValueError(f"world.workers = {wanted}, but {_starter().format(size(), wanted)}")


def note_other_workers(path: str | None) -> None:
    """A line where CONFIG.toml names another number of workers than the processes that were started."""
    own = None if path is None or size() is None else read_toml(path).get("world", {}).get("workers")
    if own not in (None, "auto", size()) and is_main_process():
        say(f"world.workers = {own} in {path}: {size()} processes were started, so {size()}", "warning", "note: ")


def run(
    config: Config,
    choose: Callable[[], Path],
    node_spec: NodeSpec,
    resume: int | None,
    show: Callable[[dict[str, Any], Path], None],
) -> None:
    """This process's part of the run; rank 0 shows progress and the result. choose: names the run directory."""
    from isles.comm.errors import WorkerFailed
    from isles.running.torchrun import take_part

    if node_spec.nodes > 1:
        raise ValueError("--nodes is for machines that start isles themselves: leave it out under torchrun")
    if not config.world.has_processes:
        raise ValueError(f'world.backend = "{config.world.backend}" needs one process: start only one')
    progress = Progress(config.method, config.world.workers, config.run.steps)
    with progress if is_main_process() else nullcontext():
        ended = take_part(config, choose, progress.line, progress.notice, resume)
    if ended is not None:
        out, summary, lost = ended
        show(summary, out)
        if lost:  # torchrun waits for each of its processes, and for ever for one that is stopped
            raise WorkerFailed(
                lost[0],
                "the others have finished without it, and the run is complete; this error has torchrun end what is "
                "left of it",
            )
