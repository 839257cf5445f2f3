"""Worker processes on this machine, joined over gloo, never left behind; with those of other machines if there are any.

launcher                     worker r
hosts the store  <--------   joins, runs `worker(world)`
waits            <--------   ("done", result) | ("error", error)
"close"           -------->  closes its connections

Workers of other machines are told and heard through their own launcher: see `isles.launch.handles`.

Whether so many worker processes have room on this machine, asked before the first is started.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

from isles.comm.errors import DeadlinePassed, WorkerFailed, is_cause
from isles.comm.sockets.connection import BEAT, no_sign_of_life
from isles.comm.transport import Deadlines
from isles.launch.handles import (
    MessageCheck,
    NodeHandle,
    ProcessHandle,
    WorkerHandle,
    WorkerMessage,
    WorkerProcesses,
    anything,
)
from isles.launch.nodes import NodeGroup
from isles.launch.worker import WorkerSpec, open_store

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
    """All workers of a run, through their handles; this is where a run is decided on. See `LocalWorkers`.

    deadlines: how long they may take to meet.
    """

    def __init__(
        self,
        workers: int,
        handles: Sequence[WorkerHandle],
        end: Callable[[float], None],
        deadlines: Deadlines | None = None,
    ) -> None:
        self.workers, self._handles, self._end = workers, handles, end
        self.failures: list[int] = []  # ranks in the order in which they failed
        self._results: list[Any] = [None] * workers
        self._waiting = set(range(workers))
        self._joining = set(range(workers))
        self._unheard = set(range(workers))  # who has given no sign of life yet
        self._join = (deadlines or Deadlines()).join
        self._meet_by = time.monotonic() + self._join
        self._moved = [0] * workers  # by rank, the bytes that each says to have moved
        self._sent_moved, self._sent_at = list(self._moved), time.monotonic()
        self._stop_wanted = False
        self._bounds: dict[int, int] | None = None  # by rank, how far those asked to hold may have come
        self._settled = False  # whether the step to stop after has been named

    def stop(self) -> None:
        """Ask all workers to stop after a common inner step (`Mesh.stop_here`). May be called from a signal handler."""
        self._stop_wanted = True

    def join(
        self, on_event: Callable[[Any], None] | None = None, on_failure: Callable[[int, Exception], None] | None = None
    ) -> list[Any]:
        """Wait for all results; a failed worker's entry is its exception. Ends every process.

        on_event: called here with everything that a worker passes to `world.report`, as it comes. on_failure: told of
        each worker that failed, as soon as it has; the others are told too, and then go on to their own end. Without it
        they are ended within seconds.
        """
        ends_at = math.inf
        try:
            while self._waiting:
                if self._stop_wanted and self._bounds is None:
                    self._bounds = {}
                    self._tell("hold")
                live = [handle for handle in self._handles if not handle.lost]
                wait(cast(Any, live), _GLANCE)
                news = [message for handle in live for message in handle.read()]
                for rank, kind, value in [*news, *self._have_not_met()]:
                    if kind == "event":
                        if on_event is not None:
                            on_event(value)
                    elif kind in ("done", "error"):
                        error = self._ended(rank, kind, value)
                        if error is not None and on_failure is not None:
                            on_failure(rank, error)
                            self._tell(("lost", rank))
                        elif error is not None:
                            grace = min(_KNOWN if is_cause(error) else _GRACE, _GRACE)
                            ends_at = min(time.monotonic() + grace, ends_at)
                    else:
                        self._heard(rank, kind, value)
                if on_failure is None:
                    self._pass_on_counts()
                    if self._waiting and self._waiting <= self._silent().keys():
                        break  # nobody is left who could name another cause
                if time.monotonic() > ends_at and all(kind == "beat" for _, kind, _ in news):
                    break  # the rest did not notice the failure in time: ended below
                self._settle_on_a_step()
            self._name_the_ended()
        finally:
            self._tell("close")
            self._end(0.0 if self._waiting else 1.0 if self.failures else 10.0)
        return self._results

    def _heard(self, rank: int, kind: str, value: Any) -> None:
        self._unheard.discard(rank)
        if kind == "interrupt":
            self._stop_wanted = True
        elif kind == "held" and self._bounds is not None:
            self._bounds[rank] = value
        elif kind == "joined":
            self._joining.discard(rank)
        elif kind == "beat":
            self._moved[rank] = value

    def _ended(self, rank: int, kind: str, value: Any) -> Exception | None:
        """Note a worker's end; its error, if this is news and one."""
        if rank not in self._waiting:
            return None
        self._waiting.remove(rank)
        if rank in self._joining and kind == "error":  # then nobody meets any more
            self._meet_by = min(self._meet_by, time.monotonic() + _KNOWN)
        self._joining.discard(rank)
        self._results[rank] = value
        if kind == "done":
            return None
        self.failures.append(rank)
        return value

    def _have_not_met(self) -> list[WorkerMessage]:
        """Those who are alive but have not met the others in time."""
        if not self._joining or time.monotonic() < self._meet_by:
            return []
        silent = sorted(self._joining & self._unheard)
        why = f"it has not met the other workers within {self._join:g} s: raise world.join_deadline"
        if lost := [*self.failures, *silent]:
            why = f"it has not met the other workers, for worker {lost[0]} is lost"
        ends = dict.fromkeys(silent, no_sign_of_life(self._join))
        ends |= dict.fromkeys(sorted(self._joining.difference(silent)), why)
        return [(rank, "error", WorkerFailed(rank, why)) for rank, why in ends.items()]

    def _pass_on_counts(self) -> None:
        """So that who waits for a worker that itself waits for another sees that the other's line moves."""
        now = time.monotonic()
        if now - self._sent_at > BEAT:
            self._sent_at = now
            if self._moved != self._sent_moved and self.workers > 2:
                self._sent_moved = list(self._moved)
                self._tell(("moved", self._sent_moved))

    def _settle_on_a_step(self) -> None:
        """Name the step to stop after, once all have said how far they are."""
        bounds = self._bounds
        if bounds is not None and not self._settled and self._waiting and bounds.keys() >= self._waiting:
            self._settled = True
            self._tell(("stop", max(bounds.values())))

    def _name_the_ended(self) -> None:
        """What to call it that workers are ended after another one's failure; silent ones first."""
        silent = self._silent()
        for rank in sorted(self._waiting, key=lambda rank: (rank not in silent, rank)):
            if rank in silent:
                why = f"it was ended by the launcher, for it was silent ({silent[rank]})"
            else:
                first = str(self._results[self.failures[0]]).splitlines()[-1]
                why = f"ended by the launcher after another worker failed ({first})"
            self._results[rank] = WorkerFailed(rank, why)
            self.failures.append(rank)

    def _silent(self) -> dict[int, Exception]:
        """By rank, the error of the first worker that waited for it in vain."""
        late = [self._results[rank] for rank in self.failures if isinstance(self._results[rank], DeadlinePassed)]
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

        def end(patience: float) -> None:
            pool.end(patience)
            del self._store  # its descriptors would last as long as the traceback of a failure, which holds the pool

        super().__init__(workers, [*pool.handles, *node_handles(node_group, workers, check)], end, deadlines)


def node_handles(node_group: NodeGroup, workers: int, check: MessageCheck) -> list[NodeHandle]:
    """Node 0's handles to the workers of the other machines. check: of all that these say."""
    shares, kind = node_group.shares(workers), ProcessHandle if node_group.spec.shared_directory else NodeHandle
    return [kind(node, tuple(shares[node]), link, check) for node, link in node_group.links.items()]


def worker_specs(
    node_group: NodeGroup, workers: int, port: int, *, threads: int, deadlines: Deadlines | None, logs: Path | None
) -> list[WorkerSpec]:
    """Those of this machine's share of `workers`; the store listens on `port` of node 0."""
    own = node_group.shares(workers)[node_group.spec.node]
    return [
        WorkerSpec(
            rank=rank,
            size=workers,
            local_rank=local_rank,
            local_size=len(own),
            host=node_group.host,
            port=port,
            threads=threads,
            interface=node_group.interface,
            deadlines=deadlines,
            log=None if logs is None else logs / f"worker-{rank}.log",
        )
        for local_rank, rank in enumerate(own)
    ]
