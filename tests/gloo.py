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
from typing import Any

import torch.distributed as dist

from isles.comm import mesh
from isles.comm.transport import Deadlines
from isles.launch.nodes import NodeGroup
from isles.launch.processes import PipeHandle
from isles.launch.store import join_store, open_store
from isles.launch.worker import attend
from isles.launch.workers import Workers, raise_first, worker_specs
from isles.training.running.server import PRELOAD

_handles: list[PipeHandle] = []


def run_gloo(
    worker: Callable[..., Any],
    workers: int = 2,
    *,
    args: Sequence[Any] = (),
    threads: int = 1,
    deadlines: Deadlines | None = None,
) -> list[Any]:
    """As `isles.run_local`, without `return_errors`."""
    if not all(handle.process is not None and handle.process.is_alive() for handle in _handles):
        close()  # the command, called in this process, ends the children it finds
    while len(_handles) < workers:
        _handles.append(_started(len(_handles)))
    store = open_store("127.0.0.1")
    specs = worker_specs(NodeGroup(), workers, store.port, threads=threads, deadlines=deadlines, logs=None)
    well = False
    try:
        for handle, spec in zip(_handles, specs, strict=False):
            handle.pipe.send((spec, worker, tuple(args)))
        pool = Workers(workers, _handles[:workers], lambda patience: None)
        results = pool.join()
        raise_first(results, pool.failures)
        well = True
    finally:
        if not well:
            close()
    return results


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
    while True:
        try:
            spec, worker, args = launcher.recv()
        except EOFError:
            return

        def store(port: int = spec.port) -> dist.Store:
            return join_store("127.0.0.1", port)

        if not attend(spec, launcher, store, worker, args):
            os._exit(1)
        mesh.leave()
