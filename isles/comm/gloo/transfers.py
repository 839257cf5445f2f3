"""How the distributed backend runs transfers behind the computation: one driver thread steps them, and a pool of
threads waits for gloo.

A transfer's generator takes its first step in the caller's thread, so transfers start in program order; every later
step runs on the driver thread when the works it waits for are done. Reductions there leave Python's lock to the
computation, and take as many torch threads as the caller has.

A deadline counts from the last sign of life of the peers that are waited for: from the last byte to or from them, or,
where they have all that we have for them, from the last byte between them and others, for at most twenty deadlines.

torch.distributed offers no way to poll a gloo receive (`is_completed` stays False until somebody waits), and a wait
with a time-out closes every pair of the rank when it expires. So each posted message gets a thread (`Waiters`) that
waits without limit, and transfers keep the deadlines. Idle threads are reused; a thread stuck on a silent peer harms
nobody until the process ends. Then it must have ended before the interpreter does: one that wakes up meanwhile, in the
middle of torch, takes the process down (SIGABRT).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch

from isles.comm.errors import DeadlinePassed, PeerLost
from isles.comm.gloo.liveness import GLANCE, Liveness
from isles.comm.sockets import loop
from isles.comm.tags import Channel
from isles.comm.traffic import Traffic
from isles.comm.transport import LinkEstimate, Steps, works_of

_LOOK = "look"  # wakes the driver's thread, that it may begin to look

_CHAIN = 20  # deadlines for which a peer is waited for that itself waits for another


class PostedWork:
    """One message on its way; `finished` counts once, whoever calls it. now: the worker's clock."""

    def __init__(self, peer: int | None, buffer: Any, now: Callable[[], float]) -> None:
        self.peer = peer
        self.at = math.inf
        self.error: Exception | None = None
        self._now = now
        self._buffer = buffer  # the buffer must live until the message is done
        self._lock = threading.Lock()  # a waiter thread ends it while the driver begins to watch it
        self._done = False
        self._watcher: Watch | None = None

    def done(self) -> bool:
        return self._done

    def finished(self, error: Exception | None = None) -> None:
        """Mark as done (or failed) and tell the transfer that waits."""
        with self._lock:
            if self._done:  # its peer was given up before
                return
            self.at, self.error, self._buffer = self._now(), error, None
            self._done = True  # last: it is asked without the lock
            watcher = self._watcher
        if watcher is not None:
            watcher.one_done()

    def watch(self, watcher: Watch) -> bool:
        """Notify `watcher` when done. False when it is done already."""
        with self._lock:
            if self._done:
                return False
            self._watcher = watcher
            return True


class HostEvent(PostedWork):
    """See `isles.comm.transport.WaitEvent`. No loss can fail it: it is set then, too."""

    def set(self) -> None:
        super().finished()

    def finished(self, error: Exception | None = None) -> None:
        self.set()


class Watch:
    """Counts the works that one yield waits for and wakes its transfer when `needed` are done, or one has failed."""

    def __init__(self, transfer: BackgroundTransfer, works: Sequence[PostedWork], needed: int) -> None:
        self.transfer, self.works = transfer, works
        self._lock = threading.Lock()  # works end in waiter threads, also while this is being made
        self._needed = needed
        self._is_starting = True  # until `released`: nobody wakes the transfer while this is being made
        self._woken = False
        for work in works:
            if not work.watch(self):
                self.one_done()

    def released(self) -> bool:
        """From now on the transfer may be woken; True when there is nothing left to wait for."""
        with self._lock:
            self._is_starting = False
            return self._wakes()

    def one_done(self) -> None:
        with self._lock:
            self._needed -= 1
            wakes = self._wakes()
        if wakes:
            self.transfer.driver.wake(self.transfer)

    def _wakes(self) -> bool:
        """Whether the wait is over and nobody has been notified. Under the lock: True once."""
        if self._is_starting or self._woken or (self._needed > 0 and self.outcome() is None):
            return False
        self._woken = True
        return True

    def outcome(self) -> Exception | None:
        return next((work.error for work in self.works if work.error is not None), None)

    def late(self) -> list[PostedWork]:
        return [work for work in self.works if not work.done()]


class BackgroundTransfer:
    """A generator under way. See `isles.comm.transport.Transfer`."""

    def __init__(self, driver: Driver, steps: Steps[Any], channel: Channel, deadline: float, traffic: Traffic) -> None:
        self.driver, self.channel, self.seconds, self.traffic = driver, channel, deadline, traffic
        self.threads = torch.get_num_threads()  # of the caller, which may have more than when the driver began
        self._steps = steps
        self._began = driver.now()
        self._start = time.monotonic()
        self._ended = threading.Event()
        self._lock = threading.Lock()  # held while the generator runs, and to abandon it
        self._watch: Watch | None = None
        self._result: Any = None
        self._error: Exception | None = None

    def advance(self) -> None:
        with self._lock:
            while not self._ended.is_set():
                error = self._watch.outcome() if self._watch is not None else None
                try:
                    waited = self._steps.throw(error) if error is not None else next(self._steps)
                except StopIteration as end:
                    self._end(end.value, None)
                except Exception as failure:  # whatever the protocol raises belongs to whoever waits
                    self._end(None, failure)
                else:
                    self._watch = Watch(self, *works_of(waited))  # type: ignore[arg-type]
                    if not self._watch.released():
                        return

    def wait(self) -> Any:
        if not self._ended.is_set():
            start, mark = self.driver.now(), self.traffic.mark()
            while (left := self._left()) > 0 and not self._ended.wait(min(left, GLANCE)):
                self.driver.liveness.look()
                self.driver.liveness.notify_blocked({work.peer for work in self._late()}, self.driver.now() - start)
            self.traffic.waited(self.channel, start, self.driver.now(), mark)
            if not self._ended.is_set():
                self._abandon()
        if self._error is not None:
            raise self._error
        return self._result

    def done(self) -> bool:
        return self._ended.is_set() or self._left() <= 0

    def give_up_lost(self) -> None:
        """End what is waited for from peers that are gone."""
        for work in self._late():
            if (why := self.driver.liveness.loss_of(work.peer)) is not None:
                work.finished(PeerLost(-1 if work.peer is None else work.peer, why))

    def _late(self) -> list[PostedWork]:
        return self._watch.late() if self._watch is not None else []

    def _left(self) -> float:
        liveness, ends_at = self.driver.liveness, self._start + self.seconds
        for work in self._late():
            elsewhere = min(liveness.last_elsewhere(work.peer), self._start + (_CHAIN - 1) * self.seconds)
            ends_at = max(
                ends_at, max(liveness.last(work.peer), elsewhere) + self.seconds + liveness.retry_in(work.peer)
            )
        return ends_at - time.monotonic()

    def _abandon(self) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            late = min((work.peer for work in self._late()), key=self.driver.liveness.last, default=None)
            self._steps.close()
            self._end(None, DeadlinePassed(-1 if late is None else late, self.channel, self.seconds))

    def _end(self, result: Any, error: Exception | None) -> None:
        self._result, self._error = result, error
        self.traffic.transfer(self.channel, self._began, self.driver.now())
        self._ended.set()
        self.driver.under_way.discard(self)


class Driver:
    """The thread that steps transfers whose works are done, and looks who is alive while any is under way.

    now: the worker's clock, seconds.
    """

    def __init__(self, now: Callable[[], float], liveness: Liveness) -> None:
        self.now, self.liveness = now, liveness
        self.under_way: set[BackgroundTransfer] = set()
        self._ready: SimpleQueue[BackgroundTransfer | str | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def event(self, seconds: float) -> HostEvent:
        event = HostEvent(None, None, self.now)
        if seconds < math.inf:
            loop.call(lambda: asyncio.get_running_loop().call_later(seconds, event.set))
        return event

    def start(self, steps: Steps[Any], channel: Channel, deadline: float, traffic: Traffic) -> BackgroundTransfer:
        self._begin()
        transfer = BackgroundTransfer(self, steps, channel, deadline, traffic)
        sleeps = not self.under_way
        self.under_way.add(transfer)
        if sleeps:
            self._ready.put(_LOOK)
        transfer.advance()
        return transfer

    def wake(self, transfer: BackgroundTransfer) -> None:
        self._ready.put(transfer)

    def close(self) -> None:
        """Let the thread end after what is ready."""
        if self._thread is not None:
            self._ready.put(None)
            self._thread.join(5.0)
            self._thread = None

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="isles-transfers", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while True:
            with contextlib.suppress(Empty):
                if (transfer := self._ready.get(timeout=GLANCE if self.under_way else None)) is None:
                    return
                if isinstance(transfer, BackgroundTransfer):
                    if torch.get_num_threads() != transfer.threads:
                        torch.set_num_threads(transfer.threads)
                    transfer.advance()
            self.liveness.look()
            for transfer in list(self.under_way):
                transfer.give_up_lost()


WaiterJob = Callable[[], Callable[[], None]]
"""Waits, and returns what then tells of it; neither raises."""


class Waiters:
    """A pool that never queues: a job gets an idle thread, or a new one."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[WaiterJob | None]] = []
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()  # of the idle list, which callers take from and waiters put back to
        self._closed = False

    def submit(self, job: WaiterJob) -> None:
        """Run `job` on a thread of its own. It is idle again before the job reports: a caller that then has another job
        finds it, so there are never more threads than jobs have waited at once.
        """
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = SimpleQueue()
            thread = threading.Thread(target=self._serve, args=(inbox,), name="isles-waiter", daemon=True)
            self._threads.add(thread)
            thread.start()
        inbox.put(job)

    def close(self, seconds: float) -> bool:
        """Let idle threads end, and busy ones after their job. True if all have ended within `seconds`."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)
        ends_at = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(ends_at - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self, inbox: SimpleQueue[WaiterJob | None]) -> None:
        while (job := inbox.get()) is not None:
            report = job()
            with self._lock:
                closed = self._closed
                if not closed:
                    self._idle.append(inbox)
            report()
            del job, report  # an idle thread keeps no message, and so no buffer, alive
            if closed:
                return


class OnHostClock:
    """Computing takes the time it takes, and nothing of it can be saved."""

    step_seconds = 0.0
    away_seconds = 0.0

    def __init__(self, liveness: Liveness | None = None) -> None:
        self.traffic = Traffic()
        self.liveness = liveness or Liveness()
        self._start = time.perf_counter()
        self._driver = Driver(self.now, self.liveness)

    def run(self, protocol: Steps[Any], channel: Channel, deadline: float) -> BackgroundTransfer:
        """Drive `protocol` in the background; the transfer fails `deadline` seconds after the last sign of life."""
        return self._driver.start(protocol, channel, deadline, self.traffic)

    def event(self, seconds: float = math.inf) -> HostEvent:
        return self._driver.event(seconds)

    def link_estimate(self) -> LinkEstimate | None:
        return self.liveness.link_estimate()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def compute(self, seconds: float) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
