"""Worker processes on this machine, joined over gloo, never left behind; with those of other machines if there are any.

launcher                     worker r
hosts the store  <--------   joins, runs `worker(world)`
waits            <--------   ("done", result) | ("error", error)
"close"           -------->  closes its connections

Workers of other machines are told and heard through their own launcher: see `isles.launch.relay`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

from isles.comm.errors import DeadlinePassed, WorkerFailed, is_cause
from isles.comm.transport import Deadlines
from isles.launch.nodes import NodeGroup
from isles.launch.processes import WorkerHandle, WorkerProcesses
from isles.launch.relay import MessageCheck, NodeHandle, ProcessHandle, anything
from isles.launch.store import open_store
from isles.launch.worker import WorkerSpec

_GLANCE = 0.2  # seconds between looks at whether a stop is wanted or the grace has ended
_GRACE = 5.0  # seconds in which the worker that is the cause may be heard of, after one that only noticed
_KNOWN = 1.0  # seconds that the others have once the cause is known


def run_local(
    worker: Callable[..., Any],
    workers: int = 2,
    *,
    args: Sequence[Any] = (),
    threads: int = 1,
    deadlines: Deadlines | None = None,
    return_errors: bool = False,
) -> list[Any]:
    """Run `worker(world, *args)` in `workers` processes over gloo and return their results in rank order.

    worker: a function that a fresh process can import (defined in a module; a script needs its `if __name__ ==
    "__main__"`). threads: torch threads a worker; 1 keeps results equal to the bit on any machine. Raises the first
    failure (WorkerFailed for a process that died) after ending the others, unless `return_errors`, which lets these go
    on to their own end and puts failures in the list.
    """
    pool = LocalWorkers(worker, workers, args=args, threads=threads, deadlines=deadlines)
    if return_errors:
        return pool.join(on_failure=lambda rank, error: None)
    results = pool.join()
    raise_first(results, pool.failures)
    return results


def raise_first(results: Sequence[Any], failures: Sequence[int]) -> None:
    """Raise the earliest failure that is not merely the loss of another worker."""
    for rank in sorted(failures, key=lambda rank: not is_cause(results[rank])):
        raise results[rank]


class Workers:
    """All workers of a run, through their handles; this is where a run is decided on. See `LocalWorkers`."""

    def __init__(self, workers: int, handles: Sequence[WorkerHandle], end: Callable[[float], None]) -> None:
        self.workers, self._handles, self._end = workers, handles, end
        self.failures: list[int] = []  # ranks in the order in which they failed
        self._stop_wanted = False

    def stop(self) -> None:
        """Ask all workers to stop after a common inner step (`Mesh.stop_here`). May be called from a signal handler."""
        self._stop_wanted = True

    def join(
        self,
        on_event: Callable[[Any], None] | None = None,
        on_failure: Callable[[int, Exception], None] | None = None,
    ) -> list[Any]:
        """Wait for all results; a failed worker's entry is its exception. Ends every process.

        on_event: called here with everything that a worker passes to `world.report`, as it comes. on_failure: told of
        each worker that failed, as soon as it has; the others then go on to their own end. Without it they are ended
        within seconds.
        """
        results: list[Any] = [None] * self.workers
        waiting = set(range(self.workers))
        ends_at: float | None = None
        bounds: dict[int, int] | None = None  # by rank, how far those asked to hold may have come
        settled = False  # whether the step to stop after has been named
        try:
            while waiting:
                if self._stop_wanted and bounds is None:
                    bounds = {}
                    self._tell("hold")
                live = [handle for handle in self._handles if not handle.lost]
                ready = wait(cast(Any, live), _GLANCE)
                if not ready and ends_at is not None and time.monotonic() > ends_at:
                    break  # the rest did not notice the failure in time: ended below
                for rank, kind, value in [message for handle in live for message in handle.read()]:
                    if kind == "event":
                        if on_event is not None:
                            on_event(value)
                    elif kind == "interrupt":
                        self._stop_wanted = True
                    elif kind == "held" and bounds is not None:
                        bounds[rank] = value
                    elif rank in waiting:
                        waiting.remove(rank)
                        results[rank] = value
                        if kind == "error":
                            self.failures.append(rank)
                            if on_failure is not None:
                                on_failure(rank, value)
                            else:
                                grace = min(_KNOWN if is_cause(value) else _GRACE, _GRACE)
                                ends_at = min(time.monotonic() + grace, ends_at or math.inf)
                if on_failure is None and waiting and waiting <= self._silent(results).keys():
                    break  # nobody is left who could name another cause
                if bounds is not None and not settled and waiting and bounds.keys() >= waiting:
                    settled = True
                    self._tell(("stop", max(bounds.values())))
            silent = self._silent(results)
            for rank in sorted(waiting, key=lambda rank: (rank not in silent, rank)):
                if rank in silent:
                    why = f"it was ended by the launcher, for it was silent ({silent[rank]})"
                else:
                    first = str(results[self.failures[0]]).splitlines()[-1]
                    why = f"ended by the launcher after another worker failed ({first})"
                results[rank] = WorkerFailed(rank, why)
                self.failures.append(rank)
        finally:
            self._tell("close")
            self._end(0.0 if waiting else 1.0 if self.failures else 10.0)
        return results

    def _silent(self, results: Sequence[Any]) -> dict[int, Exception]:
        """By rank, the error of the first worker that waited for it in vain."""
        late = [results[rank] for rank in self.failures if isinstance(results[rank], DeadlinePassed)]
        return {error.peer: error for error in reversed(late)}

    def _tell(self, command: Any) -> None:
        for handle in self._handles:
            handle.tell(command)


class LocalWorkers(Workers):
    """Processes that run `worker(world, *args)`; `join` collects their results and leaves no process behind.

    node_group: the machines of the run, of which this is node 0; alone by default. `workers` counts those of all
    machines. check: of what the other machines say. logs: a folder for what the workers of this machine print; None
    leaves it on the terminal.
    """

    def __init__(
        self,
        worker: Callable[..., Any],
        workers: int,
        *,
        args: Sequence[Any] = (),
        threads: int = 1,
        deadlines: Deadlines | None = None,
        logs: Path | None = None,
        node_group: NodeGroup | None = None,
        check: MessageCheck = anything,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers = {workers}: choose 1 or more")
        node_group = node_group or NodeGroup()
        # The store lives here, not in a worker, so that the loss of any worker leaves it standing.
        self._store = open_store(node_group.host)
        node_group.go(store=self._store.port)
        own = worker_specs(node_group, workers, self._store.port, threads=threads, deadlines=deadlines, logs=logs)
        pool = WorkerProcesses(worker, own, args)
        self.processes = pool.processes
        super().__init__(workers, [*pool.handles, *node_handles(node_group, workers, check)], pool.end)


def node_handles(node_group: NodeGroup, workers: int, check: MessageCheck) -> list[NodeHandle]:
    """Node 0's handles to the workers of the other machines. check: of all that these say."""
    shares, kind = node_group.shares(workers), ProcessHandle if node_group.spec.shared_directory else NodeHandle
    return [kind(node, tuple(shares[node]), link, check) for node, link in node_group.links.items()]


def worker_specs(
    node_group: NodeGroup, workers: int, port: int, *, threads: int, deadlines: Deadlines | None, logs: Path | None
) -> list[WorkerSpec]:
    """Those of this machine's share of `workers`; the store listens on `port` of node 0."""
    return [
        WorkerSpec(
            rank=rank,
            size=workers,
            local_rank=local_rank,
            host=node_group.host,
            port=port,
            threads=threads,
            interface=node_group.interface,
            deadlines=deadlines,
            log=None if logs is None else logs / f"worker-{rank}.log",
        )
        for local_rank, rank in enumerate(node_group.shares(workers)[node_group.node])
    ]
