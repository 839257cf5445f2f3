"""Running one function on a group of workers, as [world] says: processes here, or the virtual backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from isles.launch.workers import raise_first
from isles.training.config.sections import Config
from isles.training.records.claimed import clear_logs
from isles.training.running.backends import starter
from isles.training.running.interrupts import first_interrupt


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
    pool = starter(config.world.backend).call(worker, workers, config, args, out)
    with first_interrupt(pool.stop):
        results = pool.join(on_event)
    raise_first(results, pool.failures)
    clear_logs(out)
    return results
