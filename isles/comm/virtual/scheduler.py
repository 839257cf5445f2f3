"""The scheduler of a virtual run: N worker threads act in the order of virtual time, one at a time.

The rule (conservative discrete-event simulation): every transport call with an effect on others takes place in its
worker's **turn**, when no other worker can still act at an earlier (virtual time, rank), and every network event up to
that time has been executed. So the order of all calls and events is a function of the program and the seed alone.

    running     its thread computes; its next call comes at its clock or later
    ready       its thread sleeps in a call until its turn
    resuming    its thread sleeps; what it waited for has arrived (or it has not begun)
    blocked     its thread sleeps in Transfer.wait
    ended       or killed: its next call, and a call in which it sleeps, raise `Killed`

At most `slots` threads run. A worker that is still the first in order keeps running without a thread switch; otherwise
it wakes the next one and sleeps on a lock of its own, so a switch costs one wake-up, whatever the number of workers.

Charging computation moves only the worker's own clock, so it needs no turn. That lets several workers compute at once
with `slots` > 1 (each has promised not to act before its clock), and saves switches with one.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Sequence
from threading import get_ident
from types import TracebackType
from typing import Protocol

import torch

from isles.comm.errors import CommError
from isles.network.engine import EventQueue
from isles.network.pauses import Absences

Turn = tuple[float, int]  # (clock, rank)


class Stopped(BaseException):
    """The run was stopped from outside (Ctrl-C): unwinds a worker's thread past `except Exception`."""


class Killed(BaseException):
    """This worker dies now: unwinds its thread past `except Exception`. The others go on."""


class Blocker(Protocol):
    """What a worker blocks on: a protocol in progress."""

    error: BaseException | None
    """The error that ended it; None: it has not failed."""

    def fail(self, error: Exception) -> None: ...


class VirtualWorker:
    """One worker in virtual time. As a context manager: its turn (no effect inside a turn and in events)."""

    __slots__ = ("absences", "awaits", "clock", "gate", "killed", "rank", "scheduler")

    def __init__(self, scheduler: Scheduler, rank: int, absences: Absences | None, begins: float) -> None:
        self.scheduler = scheduler
        self.rank = rank
        self.absences = absences  # None: never paused
        self.clock = begins
        self.killed = False
        self.awaits: Blocker | None = None
        self.gate = threading.Lock()  # released to let this worker go on
        self.gate.acquire()

    def __enter__(self) -> VirtualWorker:
        if self.scheduler.is_held:
            self.scheduler.depth += 1
        else:
            self.scheduler.take_turn(self)
        return self

    def back(self, time: float) -> float:
        """`time`, or when the worker resumes if it is paused then."""
        return time if self.absences is None else self.absences.back(time)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.scheduler.depth:
            self.scheduler.depth -= 1
        else:
            self.scheduler.end_turn()


class _Mutex:
    """A lock that knows its holder."""

    def __init__(self) -> None:
        self._lock, self.holder = threading.Lock(), 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.holder = get_ident()

    def __exit__(self, *error: object) -> None:
        self.holder = 0
        self._lock.release()


class Scheduler:
    """Passes the turn from worker to worker. One lock guards all state; it is held in turns and while events run."""

    def __init__(self, absences: Sequence[Absences | None], slots: int, begins: Sequence[float] | None = None) -> None:
        """begins: the clock of each worker at its start; None: 0."""
        clocks = begins or [0.0] * len(absences)
        self.timeline = EventQueue()
        self.workers = [VirtualWorker(self, rank, away, clocks[rank]) for rank, away in enumerate(absences)]
        self.stepping: Blocker | None = None
        """The transfer whose protocol is being stepped."""
        self._slots = slots
        self.mutex = _Mutex()
        """Held in turns and while events run; also by outside code that acts like an event."""
        self.depth = 0  # nesting of turns inside a turn or an event
        self._running: list[VirtualWorker] = []
        self._ready: list[Turn] = []
        self._resuming: list[Turn] = sorted((worker.clock, worker.rank) for worker in self.workers)
        self._blocked = 0
        self._stopped = False

    @property
    def is_held(self) -> bool:
        """Whether this thread is in a turn or executes an event, so that its calls are part of that."""
        return self.mutex.holder == get_ident()

    # Called by worker threads

    def begin(self, worker: VirtualWorker) -> None:
        """Sleep until the worker may start. Stopped if the run was stopped before."""
        worker.gate.acquire()
        if self._stopped:
            raise Stopped

    def take_turn(self, worker: VirtualWorker) -> None:
        """Return in the worker's turn, holding the lock until `end_turn`."""
        self.mutex.__enter__()
        try:
            if self._stopped:
                raise Stopped
            key = (worker.clock, worker.rank)
            timeline = self.timeline
            while True:
                if self._is_another_before(key):
                    self._running.remove(worker)
                    heapq.heappush(self._ready, key)
                    self._sleep(worker)
                    break  # woken in its turn, and no other worker could act since
                if timeline.next_time() > worker.clock:
                    break
                timeline.step()
            timeline.now = worker.clock
            if self._resuming and len(self._running) < self._slots:
                self._dispatch()
            _live(worker)
        except Killed:
            self.mutex.__exit__()
            raise
        except BaseException:
            self._stop()  # stopped already, or an event failed: no order can be guaranteed any more
            self.mutex.__exit__()
            raise

    def end_turn(self) -> None:
        """Release the lock; the worker's thread computes on."""
        self.mutex.__exit__()

    def advance(self, worker: VirtualWorker, clock: float) -> None:
        """Move the worker's clock to `clock` (seconds). Needs no turn, see the module's docstring."""
        if self._stopped:
            raise Stopped
        _live(worker)
        if self._slots == 1:
            worker.clock = clock  # no other worker runs, so the next one will see it
            return
        with self.mutex:
            worker.clock = clock
            self._dispatch()  # others may have waited for this clock to pass theirs

    def block(self, worker: VirtualWorker, blocker: Blocker) -> None:
        """In the worker's turn: sleep until `wake`, which moves its clock."""
        worker.awaits = blocker
        self._blocked += 1
        self._running.remove(worker)
        self._sleep(worker)

    def retake_turn(self, worker: VirtualWorker) -> None:
        """After `block`, which only lets the worker go on: take its turn again, at its clock now."""
        self.end_turn()
        try:
            self.take_turn(worker)
        except BaseException:
            self.mutex.__enter__()  # the caller's `with` will release it
            raise

    def end(self, worker: VirtualWorker) -> None:
        """In the worker's turn: it will never act again."""
        self._running.remove(worker)
        self._dispatch()

    # Called under the lock, from events and turns

    def wake(self, worker: VirtualWorker) -> None:
        """The worker's blocker is done, now."""
        worker.awaits = None
        self._blocked -= 1
        worker.clock = self.timeline.now
        heapq.heappush(self._resuming, (worker.clock, worker.rank))

    def kill(self, worker: VirtualWorker) -> None:
        """End the worker; its thread notices at its next call."""
        worker.killed = True
        if worker.awaits is not None:
            self.wake(worker)

    # Called by the thread that waits for the workers

    def start(self) -> None:
        with self.mutex:
            self._dispatch()

    def stop(self) -> None:
        """Make every worker's next call, and every call it sleeps in, raise Stopped."""
        with self.mutex:
            self._stop()

    def _is_another_before(self, key: Turn) -> bool:
        return (
            (bool(self._ready) and self._ready[0] < key)
            or (bool(self._resuming) and self._resuming[0] < key)
            or (self._slots > 1 and any((other.clock, other.rank) < key for other in self._running))
        )

    def _first_clock(self) -> float | None:
        """The earliest clock of all workers that can still act by themselves."""
        first = self._ready[0][0] if self._ready else None
        if self._resuming and (first is None or self._resuming[0][0] < first):
            first = self._resuming[0][0]
        for worker in self._running:
            if first is None or worker.clock < first:
                first = worker.clock
        return first

    def _dispatch(self) -> None:
        """Execute all events that are due, and fill the free slots."""
        try:
            self._act_and_grant()
        except BaseException:
            self._stop()  # an event failed: no order can be guaranteed, and no worker may sleep for ever
            raise

    def _act_and_grant(self) -> None:
        timeline = self.timeline
        while True:
            first, next_time = self._first_clock(), timeline.next_time()
            if first is None:
                if not self._blocked:
                    return  # all have ended: messages in flight are dropped
                if next_time == math.inf:
                    _deadlock([worker for worker in self.workers if worker.awaits is not None])
                    continue
            if next_time < math.inf and (first is None or next_time <= first):
                timeline.step()
            elif not self._grant():
                return

    def _grant(self) -> bool:
        """Wake one sleeping worker, if a slot is free and one may run."""
        if len(self._running) >= self._slots:
            return False
        ready, resuming = self._ready, self._resuming
        if ready and not self._is_another_before(ready[0]):
            heap = ready
        elif resuming:
            heap = resuming  # it only computes until its next call, so order does not matter
        else:
            return False
        worker = self.workers[heapq.heappop(heap)[1]]
        self._running.append(worker)
        worker.gate.release()
        return True

    def _sleep(self, worker: VirtualWorker) -> None:
        """Let others go on until this worker is woken. Releases the lock meanwhile."""
        # With one slot this thread is alone between here and its sleep, so the global generator is still this worker's.
        state = torch.default_generator.get_state() if self._slots == 1 else None
        self._dispatch()
        self.mutex.__exit__()
        worker.gate.acquire()
        self.mutex.__enter__()
        if self._stopped:
            raise Stopped
        _live(worker)
        if state is not None:
            torch.default_generator.set_state(state)

    def _stop(self) -> None:
        self._stopped = True
        for worker in self.workers:
            if worker.gate.locked():  # asleep; or running, and then its next sleep ends at once
                worker.gate.release()


def _live(worker: VirtualWorker) -> None:
    if worker.killed:
        raise Killed


def _deadlock(blocked: list[VirtualWorker]) -> None:
    """Every worker waits without a deadline and no message is in flight: the first in virtual time gets the error."""
    first = min(blocked, key=lambda worker: (worker.clock, worker.rank))
    ranks = ", ".join(str(worker.rank) for worker in blocked)
    assert first.awaits is not None
    first.awaits.fail(CommError(f"deadlock: workers {ranks} wait for messages that are never sent"))
