"""The backend `distributed`: every worker a process of this machine, or, among several machines, of its own one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from isles.comm.mesh import Mesh
from isles.errors import warnings_told
from isles.launch.nodes import NodeGroup
from isles.launch.workers import LocalWorkers, Workers
from isles.training.config.sections import Config
from isles.training.records.events import Schema
from isles.training.records.rundir import LOGS
from isles.training.running.server import start_server
from isles.training.running.starting import deadlines
from isles.training.worker import train_worker


def train(config: Config, out: Path, resume: int | None, node_group: NodeGroup) -> Workers:
    """Start this machine's workers of a run."""
    start_server()
    return LocalWorkers(
        train_process,
        config.world.workers,
        args=(config, out, resume),
        threads=config.world.start_threads,
        deadlines=deadlines(config),
        logs=out / LOGS,
        node_group=node_group,
        check=Schema(config),
    )


def call(worker: Callable[..., Any], workers: int, config: Config, args: Sequence[Any], out: Path) -> Workers:
    """Start `worker(world, *args)` on `workers` workers."""
    return LocalWorkers(
        worker, workers, args=args, threads=config.world.start_threads, deadlines=deadlines(config), logs=out / LOGS
    )


def train_process(world: Mesh, config: Config, out: Path, resume: int | None) -> dict[str, Any] | None:
    """`train_worker` in a process of its own. What worker 0 is warned of, the user is told; the others have logs."""
    with warnings_told(world.report) if world.rank == 0 else contextlib.nullcontext():
        return train_worker(world, config, out, resume)
