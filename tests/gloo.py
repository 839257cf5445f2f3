"""`isles.run_local` on processes that stay: one pool a test process, for all tests whose workers come to a good end.

Every call is a world of its own (store, process group, transport, counters); only the processes are the same. After a
failure they are killed, and the next call starts new ones. Tests of how processes start and end use `run_local`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from isles.comm import mesh
from isles.comm.transport import Deadlines
from isles.launch.handles import PipeHandle
from isles.launch.nodes import NodeGroup
from isles.launch.worker import ByValueConnection, attend, join_store, open_store
from isles.launch.workers import Workers, raise_first, worker_specs
from isles.running.backends import PRELOAD, train_process
from isles.training.config.sections import Config
from isles.training.worker import deadlines

_handles: list[PipeHandle] = []


class _Pooled(Workers):
    """Workers on the pool, whose processes stay unless one of them failed."""

    def join(
        self,
        on_event: Callable[[Any], None] | None = None,
        on_failure: Callable[[int, Exception], None] | None = None,
    ) -> list[Any]:
        well = False
        try:
            results = super().join(on_event, on_failure)
            well = not self.failures
            return results
        finally:
            if not well:
                close()


def start(
    worker: Callable[..., Any],
    workers: int = 2,
    *,
    args: Sequence[Any] = (),
    threads: int = 1,
    deadlines: Deadlines | None = None,
) -> Workers:
    """As `LocalWorkers`, without logs."""
    if not all(handle.process is not None and handle.process.is_alive() for handle in _handles):
        close()  # the command, called in this process, ends the children it finds
    while len(_handles) < workers:
        _handles.append(_started(len(_handles)))
    store = open_store("127.0.0.1")
    specs = worker_specs(NodeGroup(), workers, store.port, threads=threads, deadlines=deadlines, logs=None)
    handles = []
    for kept, spec in zip(_handles, specs, strict=False):
        kept.pipe.send((spec, worker, tuple(args)))
        handles.append(PipeHandle(spec.rank, kept.pipe, kept.process, deadlines=deadlines))
    pool = _Pooled(workers, handles, lambda patience: None, deadlines)
    pool.store = store  # type: ignore[attr-defined]  # it lives as long as they do
    return pool


def train(config: Config, out: Path, resume: int | None, node_group: NodeGroup) -> Workers:
    """For `launch(start_workers=...)`: the workers of a run on the pool."""
    args = (config, out, resume)
    return start(
        train_process, config.world.workers, args=args, threads=config.world.start_threads, deadlines=deadlines(config)
    )


def run_gloo(worker: Callable[..., Any], workers: int = 2, **options: Any) -> list[Any]:
    """As `isles.run_local`, without `return_errors`. options: of `start`."""
    pool = start(worker, workers, **options)
    results = pool.join()
    raise_first(results, pool.failures)
    return results


def in_a_process(function: Callable[..., Any], *args: Any) -> None:
    """Call it in a new process that has torch already, to its good end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=function, args=args)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def processes() -> set[int | None]:
    """Their numbers, for tests that count the processes of a run."""
    return {handle.process.pid for handle in _handles if handle.process is not None}


def close() -> None:
    """End the processes."""
    for handle in _handles:
        assert handle.process is not None
        handle.process.kill()
        handle.process.join()
        handle.pipe.close()
    _handles.clear()


def _started(rank: int) -> PipeHandle:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(target=_live, args=(theirs,), name=f"gloo-{rank}", daemon=True)
    process.start()
    theirs.close()
    return PipeHandle(rank, ours, process)


def _live(launcher: Connection) -> None:
    """One world after the other, until the test process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # by which multiprocessing ends it
    while True:
        try:
            spec, worker, args = launcher.recv()
        except EOFError:
            return

        def store(port: int = spec.port) -> dist.Store:
            return join_store("127.0.0.1", port)

        if not attend(spec, ByValueConnection(launcher), store, worker, args):
            os._exit(1)
        mesh.leave()
