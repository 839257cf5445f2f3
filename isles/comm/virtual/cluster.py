"""The virtual backend: N workers in one process on a virtual clock, where messages cost what `isles.network.links`
says.

Real tensors and real training; only time is simulated. Clocks, results and errors are functions of the program and the
seed: the same on any host, at any load, with any number of `slots`. A worker is a thread; `scheduler` decides which may
go on. `run_virtual` is the virtual backend's counterpart of `run_local`; `VirtualTransport` is one worker's end, see
`isles.comm.transport.Transport`.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isles.base.modes import torch_threads
from isles.comm import mesh
from isles.comm.errors import PeerLost
from isles.comm.stopping import SharedStopControl
from isles.comm.tags import Channel, Tag
from isles.comm.traffic import Traffic
from isles.comm.transport import Deadlines, Steps
from isles.comm.virtual.scheduler import Killed, Scheduler, Stopped, VirtualWorker
from isles.comm.virtual.wire import VirtualEvent, VirtualTransfer, VirtualWire, VirtualWork
from isles.network.links import Links, Topology
from isles.network.links import links as preset
from isles.network.noise import lognormal
from isles.network.pauses import KnownPauses, Pauses


class VirtualTransport:
    """Worker `rank` of `cluster`; used only by that worker's thread and by the protocols that it runs.

    Every call takes effect in the worker's turn, except `compute` and `now`, which concern only its own clock. With
    one slot torch's global CPU generator is this worker's own between calls; protocols must not draw from it.
    """

    native = False

    def __init__(self, scheduler: Scheduler, wire: VirtualWire, rank: int, cluster: VirtualCluster) -> None:
        self.rank = rank
        self.size = wire.size
        self.step_seconds = cluster.step_seconds
        self.compute_seconds = 0.0
        """Seconds of computation charged so far, factors included."""
        self.away_seconds = 0.0
        """Seconds for which it was paused since this transport was made."""
        self._scheduler, self._wire = scheduler, wire
        self._worker: VirtualWorker = scheduler.workers[rank]
        self._speed, self._jitter, self._seed = cluster.speeds[rank], cluster.compute_jitter, cluster.seed
        self._computed = 0  # calls of `compute` so far: the jitter's counter
        self._traffic = Traffic()
        self._transfers: list[VirtualTransfer] = []  # in progress
        self.suspect: Callable[[int], None] | None = None
        """Called repeatedly, in an event, with each peer that this worker is blocked on."""

    @property
    def traffic(self) -> Traffic:
        """Totals up to this worker's clock. Reading takes a turn, so that what is logged does not depend on `slots`."""
        with self._worker:
            return self._traffic

    def send(self, peer: int, data: Tensor, tag: Tag) -> VirtualWork:
        """Done when the last bit has left the uplink; PeerLost if the peer has ended before."""
        self._check(peer, data)
        with self._worker:
            work = VirtualWork(self._worker, peer, None, self._scheduler.stepping)
            self._wire.send(self.rank, peer, data, tag, work)
        return work

    def recv(self, peer: int | None, out: Tensor, tag: Tag) -> VirtualWork:
        """Done at arrival; from anyone: the earliest arrival, ties by rank.

        Fails with PeerLost if the peer has ended and no such message is in flight, with ValueError if it has another
        size.
        """
        self._check(peer, out)
        with self._worker:
            work = VirtualWork(self._worker, peer, out, self._scheduler.stepping)
            self._wire.recv(self.rank, peer, tag, work)
        return work

    def run(self, protocol: Steps[Any], channel: Channel, deadline: float) -> VirtualTransfer:
        """Drop messages that a failed transfer had asked for when they arrive."""
        with self._worker:
            transfer = VirtualTransfer(self._scheduler, self._worker, protocol, channel, deadline, self._traffic)
            transfer.suspect = self.suspect
            transfer.start()
            self._transfers = [other for other in (*self._transfers, transfer) if not other.finished]
        return transfer

    def event(self, seconds: float = math.inf) -> VirtualEvent:
        with self._worker:
            return VirtualEvent(self._worker, seconds)

    def link_estimate(self) -> None:
        """None: all workers are in this process."""

    def now(self) -> float:
        """Seconds of virtual time; inside a protocol: that of the event that steps it."""
        if self._scheduler.is_held:
            return self._scheduler.timeline.now
        return self._worker.clock

    def compute(self, seconds: float) -> None:
        """Move this worker's clock by `seconds` x its speed factor x its jitter, and by the pauses that begin
        meanwhile. ValueError for less than 0 s.
        """
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"computing takes 0 s or more, got {seconds}")
        assert not self._scheduler.is_held, "protocols take no time: charge in the worker"
        charged = seconds * self._speed * lognormal(self._jitter, self._seed, self.rank, self._computed)
        self._computed += 1
        self.compute_seconds += charged
        worker = self._worker
        begun = worker.clock
        if worker.absences is None:
            self._scheduler.advance(worker, begun + charged)
            return
        self._scheduler.advance(worker, worker.absences.after(begun, charged))
        for leaves, back in worker.absences.between(begun, worker.clock):
            self.away_seconds += back - leaves
            self._traffic.paused(leaves, back)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: clock, counters, latest arrivals. RuntimeError while a transfer is in progress (one without a
        deadline only listens, and does not count).

        A run that continues from the states of all workers computes the same bits if the links were idle: each worker's
        own sends had left, and for shared uplinks and narrow downlinks all workers were at one virtual time (after a
        barrier). Otherwise only times differ, by the traffic on those links.
        """
        with self._worker:
            if any(not transfer.finished and not transfer.listens for transfer in self._transfers):
                raise RuntimeError(f"worker {self.rank} has transfers under way: settle them before a checkpoint")
            latest = self._wire.latest[self.rank]
            return {
                "clock": self._worker.clock,
                "computed": self._computed,
                "compute_seconds": self.compute_seconds,
                "messages": {str(target): count for target, count in self._wire.numbers[self.rank].items()},
                "latest": [
                    [target, channel, time] for (target, channel), time in latest.items() if time > self._worker.clock
                ],
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`. Time never goes back: an earlier state of the same run continues from now."""
        with self._worker:
            clock = max(float(state["clock"]), self._worker.clock)
            self._computed, self.compute_seconds = int(state["computed"]), float(state["compute_seconds"])
            numbers, latest = self._wire.numbers[self.rank], self._wire.latest[self.rank]
            numbers.clear()
            numbers.update({int(target): int(count) for target, count in state["messages"].items()})
            for target, channel, time in state["latest"]:
                key = int(target), channel
                latest[key] = max(float(time), latest.get(key, 0.0))
        self._scheduler.advance(self._worker, clock)

    def give_up(self, member: int, why: str | PeerLost) -> None:
        """In an event: cancel waits for `member`; later messages are tried again."""
        error = PeerLost(member, why) if isinstance(why, str) else why
        self._wire.end(self.rank, lambda peer, _: peer == member, lambda _: error)

    def again(self, tag: Tag) -> None:
        """See `VirtualWire.again`; in an event."""
        self._wire.again(self.rank, tag)

    def over(self, channel: Channel, round: int) -> None:
        """See `VirtualWire.over`."""
        with self._worker:
            self._wire.over(self.rank, channel, round)

    def close(self) -> None:
        """Nothing to do: threads and messages belong to the cluster."""

    def abandon(self, error: Exception) -> None:
        for transfer in self._transfers:
            transfer.fail(error)
        self._transfers = []

    def died(self, at: float, error: Exception) -> None:
        """The worker ended at `at`: uncount computing beyond it, because clocks of computing workers run ahead."""
        worker = self._worker
        if worker.clock > at:
            away = [] if worker.absences is None else worker.absences.between(at, worker.clock)
            self.compute_seconds -= worker.clock - at - sum(back - leaves for leaves, back in away)
        self.abandon(error)

    def _check(self, peer: int | None, buffer: Tensor) -> None:
        assert peer is None or (0 <= peer < self.size and peer != self.rank), f"worker {self.rank} has no peer {peer}"
        assert buffer.dtype is torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous(), "not flat contiguous uint8"


class VirtualCluster:
    """`workers` workers connected by `links` (a `Links`, the name of a preset, or a .toml file).

    inner:          workers of an island (neighbours by rank), which are connected by `inner_links` instead.
    step_seconds:   the charge of one inner step (`Transport.step_seconds`).
    speeds:         factor on the seconds of each worker's computing; 2.0 takes twice as long.
    compute_jitter: sigma of a log-normal factor of mean 1 on each charge, a function of (seed, rank, its number).
    pauses:         when workers are suspended (`isles.network.pauses`): a paused worker neither computes nor notices an
                    arrival or a passed deadline until it resumes. None: never.
    begins:         the clock at which each worker starts; None: all at 0.
    slots:          how many threads may compute at once. With 1, torch's global CPU generator is kept apart for each
                    worker, so that dropout behaves as in processes of their own. With more, all share it in no fixed
                    order, and a program that draws from it is not reproducible. Other global generators (Python's,
                    numpy's, CUDA's) are never kept apart.

    ValueError for inconsistent arguments. A cluster is only a description: each `run` starts at clock 0.
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
        """Run `fn(transport)` for every rank to its end and return the results in rank order; None for a worker that
        was killed. before: called first, to schedule events.

        A worker that raises, or returns while others wait for messages it never sent, is lost to them: PeerLost at
        its virtual time. When all have ended, the exception that came first in virtual time is raised; with
        `return_errors` the list holds the exceptions instead. No thread is left, also after errors and Ctrl-C.
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
            VirtualTransport(self.scheduler, self.wire, rank, cluster) for rank in range(cluster.workers)
        ]
        self._results: list[Any] = [None] * cluster.workers
        self._errors: list[BaseException] = []  # in order of virtual time
        self._started: list[threading.Thread] = []
        self._ended: list[int] = []  # ranks whose threads have ended
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
        except BaseException:  # Ctrl-C, or the system starts no more threads
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
            if len(self._ended) == len(self._started):  # none ends before all have started
                self._all_ended.set()

    def _work(self, worker: VirtualWorker) -> None:
        error: BaseException | None = None
        try:
            self.scheduler.begin(worker)
            if self._random is not None:
                torch.set_rng_state(self._random)  # the state with which a forked process would begin
            self._results[worker.rank] = self._fn(self.transports[worker.rank])
        except (Stopped, Killed):
            if worker.killed:  # end its thread
                worker.killed = False
                with contextlib.suppress(Stopped), worker:
                    self.scheduler.end(worker)
            return
        except BaseException as failure:  # any exception is this worker's result
            error = failure
        try:
            with worker:
                self._end(worker, error)
        except Stopped:
            if error is not None:
                self._errors.append(error)  # perhaps the reason for which the run was stopped
        except BaseException as failure:
            self._errors.insert(0, failure)
            self.scheduler.stop()

    def _end(self, worker: VirtualWorker, error: BaseException | None) -> None:
        """In its turn: remove an ended worker."""
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
            sigma of a log-normal factor on each step. pauses: when workers are suspended; the `deadlines` of those that
            wait for them should be longer. slots: workers that compute at once; results do not depend on it. Losses,
            weights, bytes and errors equal those of `run_local`. stop_control: through which the run may be asked to
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
