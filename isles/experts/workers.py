"""Running one function on a group of workers, as [world] says: processes here, or the virtual backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from isles.comm.local import LocalWorkers, raise_first
from isles.comm.orders import SharedOrders
from isles.comm.simulated import run_virtual
from isles.training.config import Config
from isles.training.launch import deadlines, first_interrupt
from isles.training.rundir import LOGS


def run_workers(
    worker: Callable[..., Any],
    workers: int,
    config: Config,
    args: Sequence[Any],
    on_event: Callable[[Any], None],
    out: Path,
) -> list[Any]:
    """`worker(world, *args)` on `workers` workers; results in rank order. The first Ctrl-C makes `world.stop_here` true
    on all of them at one step. Errors as in `run_local`.
    """
    world = replace(config.world, workers=workers)
    if world.backend == "virtual":
        orders = SharedOrders(workers)
        with first_interrupt(orders.ask):
            return run_virtual(
                worker,
                workers,
                args=args,
                links=world.links,
                threads=world.threads,
                step_seconds=world.step_seconds,
                seed=config.run.seed,
                deadlines=deadlines(config),
                on_event=on_event,
                orders=orders,
            )
    pool = LocalWorkers(worker, workers, args=args, threads=world.threads, deadlines=deadlines(config), logs=out / LOGS)
    with first_interrupt(pool.stop):
        results = pool.join(on_event)
    raise_first(results, pool.failures)
    return results
