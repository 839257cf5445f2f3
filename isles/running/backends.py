"""The backend `distributed`: every worker is a process, on this machine or on several.

Workers are forked from a server that starts early: it loads torch once for all, while the launcher loads it too.

launcher       reads the settings    loads torch       starts the workers
fork server    loads torch, the trainer, what the first optimizer step needs     forks them: ready at once
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from isles.base.errors import notify_warnings
from isles.comm.mesh import Mesh
from isles.launch.nodes import NodeGroup
from isles.launch.workers import LocalWorkers, Workers
from isles.training.config.sections import Config
from isles.training.records.events import Schema
from isles.training.records.rundir import LOGS
from isles.training.worker import deadlines, train_worker

PRELOAD = [
    "isles.running.backends",
    *("isles.training.clusters.node", "isles.training.swarm.trainer"),  # imported by name in `kinds`
    "isles.launch.preload",
]
"""Modules that the server loads, in this order."""


def start_server() -> None:
    """Start the server, unless it runs already, and return at once. It ends when this process does, even by a kill."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    # Ctrl-C and a closed terminal reach every process of a terminal, SIGTERM and SIGUSR1 often every process of a job.
    # The server and its children inherit the mask and never see them; only the launcher acts on them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        resource_tracker.ensure_running()  # the server would start it, and that unblocks the others
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP, signal.SIGTERM})
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def train(config: Config, out: Path, resume: int | None, node_group: NodeGroup) -> Workers:
    """Start this machine's workers of a run."""
    start_server()
    machines = {"node_group": node_group, "check": Schema(config)}
    return call(train_process, config.world.workers, config, (config, out, resume), out, **machines)


def call(
    worker: Callable[..., Any], workers: int, config: Config, args: Sequence[Any], out: Path, **machines: Any
) -> Workers:
    """Start `worker(world, *args)` on `workers` workers. machines: the further arguments of `LocalWorkers`."""
    waits, logs = deadlines(config), out / LOGS
    return LocalWorkers(
        worker, workers, args=args, threads=config.world.start_threads, deadlines=waits, logs=logs, **machines
    )


def train_process(world: Mesh, config: Config, out: Path, resume: int | None) -> dict[str, Any] | None:
    """`train_worker` in a process of its own. Warnings of worker 0 are shown to the user; the others have logs."""
    with notify_warnings(world.report) if world.rank == 0 else contextlib.nullcontext():
        return train_worker(world, config, out, resume)
