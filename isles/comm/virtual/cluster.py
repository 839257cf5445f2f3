"""The virtual backend: N workers in one process on a virtual clock, where messages cost what `isles.network.links`
says.

Real tensors and real training; only time is simulated. Clocks, results and errors are functions of the program and the
seed: the same on any host, at any load, with any number of `slots`. A worker is a thread; see `scheduler` for which may
go on. `run_virtual` is the virtual backend's counterpart of `run_local`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from isles.base.modes import torch_threads
from isles.comm import mesh
from isles.comm.errors import PeerLost
from isles.comm.stopping import SharedStopControl
from isles.comm.transport import Deadlines
from isles.comm.virtual.scheduler import Killed, Scheduler, Stopped, VirtualWorker
from isles.comm.virtual.transport import VirtualTransport
from isles.comm.virtual.wire import VirtualWire
from isles.network.links import Links, Topology
from isles.network.links import links as preset
from isles.network.pauses import KnownPauses, Pauses


class VirtualCluster:
    """`workers` workers connected by `links` (a `Links`, the name of a preset, or a .toml file).

    inner:          workers of an island (neighbours by rank), which are connected by `inner_links` instead.
    step_seconds:   what one inner step is charged with (`Transport.step_seconds`).
    speeds:         factor on the seconds of each worker's computing; 2.0 takes twice as long.
    compute_jitter: sigma of a log-normal factor of mean 1 on each charge, a function of (seed, rank, its number).
    pauses:         when workers are away for a while (`isles.network.pauses`): a paused worker neither computes nor
                    notices what arrives, nor that a deadline passes, until it is back. None: never.
    begins:         the clock at which each worker starts; None: all at 0.
    slots:          how many threads may compute at once. With 1, torch's global CPU generator is kept apart for each
                    worker, so that dropout behaves as in processes of their own. With more, all share it in no fixed
                    order, and a program that draws from it is not reproducible. Other global generators (Python's,
                    numpy's, CUDA's) are never kept apart.

    ValueError for what does not fit together. A cluster is only a description: each `run` starts at clock 0.
    """

    def __init__(
        self,
        workers: int,
        *,
        links: Links | str,
        inner: int = 1,
        inner_links: Links | str = "lan",
        step_seconds: float = 0.0,
        speeds: Sequence[float] | None = None,
        compute_jitter: float = 0.0,
        pauses: Pauses | KnownPauses | None = None,
        begins: Sequence[float] | None = None,
        slots: int = 1,
        seed: int = 0,
    ) -> None:
        if workers < 1 or slots < 1:
            raise ValueError(f"workers and slots must be at least 1, got {workers} and {slots}")
        if step_seconds < 0 or compute_jitter < 0:
            raise ValueError(f"step_seconds and compute_jitter must be 0 or more: {step_seconds}, {compute_jitter}")
        self.workers = workers
        near = (preset(inner_links) if isinstance(inner_links, str) else inner_links) if inner > 1 else None
        self.routes = Topology(workers, preset(links) if isinstance(links, str) else links, near, inner)
        self.step_seconds = step_seconds
        self.speeds = (1.0,) * workers if speeds is None else tuple(speeds)
        if len(self.speeds) != workers or not all(speed > 0 for speed in self.speeds):
            raise ValueError(f"speeds needs one factor above 0 for each of {workers} workers, got {self.speeds}")
        self.compute_jitter = compute_jitter
        self.pauses, self.begins = pauses, begins
        self.slots = slots
        self.seed = seed

    def run(
        self,
        fn: Callable[[VirtualTransport], Any],
        *,
        return_errors: bool = False,
        before: Callable[[Scheduler, VirtualWire, Sequence[VirtualTransport]], None] | None = None,
    ) -> list[Any]:
        """Run `fn(transport)` for every rank to its end and return the results in rank order; None for one that is
        killed. before: called first, to have things happen on the timeline.

        A worker that raises, or returns while others wait for messages it never sent, is lost to them: PeerLost at
        its virtual time. When all have ended, the exception that came first in virtual time is raised; with
        `return_errors` the exceptions stand in the list instead. No thread is left, also after errors and Ctrl-C.
        """
        run = _VirtualRun(self, fn)
        if before is not None:
            with run.scheduler.mutex:
                before(run.scheduler, run.wire, run.transports)
        return run.join(return_errors)


class _VirtualRun:
    """One run: its threads, results and errors."""

    def __init__(self, cluster: VirtualCluster, fn: Callable[[VirtualTransport], Any]) -> None:
        self._fn = fn
        pauses = cluster.pauses
        absences = [None if pauses is None else pauses.of(rank, cluster.seed) for rank in range(cluster.workers)]
        self.scheduler = Scheduler(absences, cluster.slots, cluster.begins)
        self.wire = VirtualWire(cluster.routes, cluster.seed, self.scheduler.timeline)
        self.transports = [
            VirtualTransport(
                self.scheduler,
                self.wire,
                rank,
                step_seconds=cluster.step_seconds,
                speed=cluster.speeds[rank],
                compute_jitter=cluster.compute_jitter,
                seed=cluster.seed,
            )
            for rank in range(cluster.workers)
        ]
        self._results: list[Any] = [None] * cluster.workers
        self._errors: list[BaseException] = []  # in order of virtual time
        self._started: list[threading.Thread] = []
        self._ended: list[int] = []  # ranks whose threads have nothing left to do
        self._all_ended = threading.Event()
        self._random = torch.get_rng_state() if cluster.slots == 1 else None

    def join(self, return_errors: bool) -> list[Any]:
        threads = [
            threading.Thread(target=self._thread, args=(worker,), name=f"isles-virtual-{worker.rank}", daemon=True)
            for worker in self.scheduler.workers
        ]
        try:
            for thread in threads:
                thread.start()
                self._started.append(thread)
            self.scheduler.start()
            self._wait()
        except BaseException:  # Ctrl-C, or no more threads to be had
            self.scheduler.stop()
            self._wait()
            raise
        finally:
            if self._random is not None:
                torch.set_rng_state(self._random)
        if self._errors and not return_errors:
            raise self._errors[0]
        return self._results

    def _wait(self) -> None:
        # Not by join alone: Ctrl-C in it makes Python 3.11 take a running thread for an ended one. And with a timeout:
        # a signal that comes just before a lock is waited for would not be handled until the wait ends.
        while len(self._ended) < len(self._started):
            self._all_ended.wait(0.5)
        for thread in self._started:
            thread.join()

    def _thread(self, worker: VirtualWorker) -> None:
        try:
            self._work(worker)
        finally:
            self._ended.append(worker.rank)
            if len(self._ended) == len(self._started):  # nobody ends before all have started
                self._all_ended.set()

    def _work(self, worker: VirtualWorker) -> None:
        error: BaseException | None = None
        try:
            self.scheduler.begin(worker)
            if self._random is not None:
                torch.set_rng_state(self._random)  # as a forked process would begin
            self._results[worker.rank] = self._fn(self.transports[worker.rank])
        except (Stopped, Killed):
            if worker.killed:
                self._bury(worker)
            return
        except BaseException as failure:  # whatever it is, it is this worker's result
            error = failure
        try:
            with worker:
                self._end(worker, error)
        except Stopped:
            if error is not None:
                self._errors.append(error)  # perhaps what the run was stopped for
        except BaseException as failure:
            self._errors.insert(0, failure)
            self.scheduler.stop()

    def _bury(self, worker: VirtualWorker) -> None:
        """The worker was killed; now its thread ends, too."""
        worker.killed = False
        with contextlib.suppress(Stopped), worker:
            self.scheduler.end(worker)

    def _end(self, worker: VirtualWorker, error: BaseException | None) -> None:
        """In its turn: the worker is gone."""
        why = "it has returned" if error is None else f"it raised {type(error).__name__}"
        if error is not None:
            error.add_note(f"in virtual worker {worker.rank} at {worker.clock:.6g} s")
            self._results[worker.rank] = error
            self._errors.append(error)
        self.transports[worker.rank].abandon(PeerLost(worker.rank, why))
        self.wire.lost(worker.rank, why)
        self.scheduler.end(worker)


def run_virtual(
    worker: Callable[..., Any],
    workers: int = 4,
    *,
    links: Links | str = "home-fibre",
    inner: int = 1,
    inner_links: Links | str = "lan",
    args: Sequence[Any] = (),
    threads: int = 1,
    step_seconds: float = 0.1,
    speeds: Sequence[float] | None = None,
    compute_jitter: float = 0.0,
    pauses: Pauses | None = None,
    slots: int = 1,
    seed: int = 0,
    deadlines: Deadlines | None = None,
    on_event: Callable[[Any], None] | None = None,
    stop_control: SharedStopControl | None = None,
    return_errors: bool = False,
) -> list[Any]:
    """Run `worker(world, *args)` for `workers` workers in this process, on a virtual clock; results in rank order.

    threads: torch threads of this process meanwhile; 1 keeps results equal to the bit on any machine.
    links: what a message costs; a `Links`, a preset's name or a .toml file. inner: workers of an island, as in
    `isles.mesh`, which are connected by inner_links among themselves. step_seconds: what one inner step costs
    on a worker of speed factor 1. speeds: factor on that for each worker; 2.0 is half as fast. compute_jitter:
    sigma of a log-normal factor on each step. pauses: when workers are away for a while; `deadlines` of those that
    wait for them should be longer. slots: workers that compute at once; results do not depend on it. Losses,
    weights and bytes equal those of `run_local`. Errors as there. stop_control: through which the run may be asked to
    stop.
    """
    cluster = VirtualCluster(
        workers,
        links=links,
        inner=inner,
        inner_links=inner_links,
        step_seconds=step_seconds,
        speeds=speeds,
        compute_jitter=compute_jitter,
        pauses=pauses,
        slots=slots,
        seed=seed,
    )

    def work(transport: VirtualTransport) -> Any:
        mesh.enter(transport)
        world = mesh.init(deadlines=deadlines)
        if on_event is not None:
            world = replace(world, report=on_event)
        if stop_control is not None:
            world = replace(world, stop_here=partial(stop_control.boundary, transport.rank))
        return worker(world, *args)

    with torch_threads(threads):
        return cluster.run(work, return_errors=return_errors)
