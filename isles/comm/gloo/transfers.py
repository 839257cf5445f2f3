"""Background transfers of the distributed backend: one driver thread steps them, and a pool of threads waits for gloo.

A transfer's generator takes its first step in the caller's thread, so transfers start in program order; every later
step runs on the driver thread when the works it waits for are done. Reductions there release the GIL, and take as many
torch threads as the caller has.

A deadline counts from the last sign of life of the peers that a transfer waits for: from the last byte to or from them.
If they have received everything sent to them, it counts from the last byte between them and others, for at most twenty
deadlines.

torch.distributed offers no way to poll a gloo receive (`is_completed` stays False until a thread waits), and a wait
with a time-out closes every pair of the rank when it expires. So each posted message gets a thread (`Waiters`) that
waits without limit, and transfers enforce the deadlines. Idle threads are reused; a thread stuck on a silent peer does
no harm while the process lives. But it must end before the interpreter does: a thread that wakes up during shutdown,
inside torch, takes the process down (SIGABRT).

gloo reports nothing between post and done either. So `Liveness` collects signs of life of the other workers besides
their messages:

    the kernel's counters   what gloo's connections have carried (`isles.comm.tcp`): a slow link lives while bytes move
    launchers' reports      which workers are lost; and the bytes that workers have moved between each other, so that a
                            peer that itself waits for a third one counts as alive

gloo has one TCP connection per pair and process group, among this process's descriptors: those that are new after it
joined. The ranks exchange the names of their ends over the store; at the other end a connection has the same two
addresses, swapped. The descriptors belong to gloo: a duplicate is held only during one look, because otherwise it would
hold the connection open when gloo closes it, and the other side would not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from isles.base.parsing import parse_json
from isles.comm.errors import DeadlinePassed, PeerLost
from isles.comm.sockets import loop
from isles.comm.tags import Channel
from isles.comm.tcp import ConnectionState, connection_state, is_far, keep_trying, looks, opened, try_soon
from isles.comm.traffic import Traffic
from isles.comm.transport import Deadlines, LinkEstimate, Steps, works_of

GLANCE = 0.1  # seconds between looks
_CLOSED = 1.0  # seconds for gloo to read what arrived before a connection was closed
_UNSEEN = 0.5e6  # bits per second assumed of a link whose progress cannot be seen: of the slowest supported one
T = TypeVar("T")


class Liveness:
    """What one worker knows of the others' liveness. silence: seconds until a worker counts as lost; None: default."""

    def __init__(self, silence: float | None = None) -> None:
        self._silence = Deadlines().silence if silence is None else silence
        self._looking = threading.Lock()  # only tried, never waited for: one thread's look serves all
        self._looked = -math.inf
        self._known: dict[int, dict[str, int]] = {}  # by peer: its connections' names and descriptors
        self._moved: dict[int, int] = {}  # by peer: bytes
        self._at: dict[int, float] = {}  # by peer: host clock when they last changed
        self._again: dict[int, float] = {}
        self._idle: set[int] = set()  # peers that have received everything sent to them
        self._others: dict[
            int, tuple[int, float]
        ] = {}  # by worker: bytes moved by its own report, and when they changed
        self._closed: dict[int, float] = {}  # by peer: when its connections were first seen closed
        self._losses: dict[int, str] = {}
        self._tries_soon = True
        self.glances = 0
        """Grows while a thread waits for others."""

    def meet(self, make: Callable[[], T], rank: int, ranks: Sequence[int], store: Callable[[], dist.Store]) -> T:
        """Call `make`, which connects the workers `ranks`, and return its result; its new connections are observed from
        then on. store: where they can all write, for this group alone.
        """
        before = connections()
        result = make()
        mine = {name: fd for name, fd in connections().items() if name not in before}
        shared = store()
        # Before any `get`, which waits: otherwise all would wait for each other.
        shared.set(str(rank), json.dumps(sorted(mine)))
        for fd in mine.values():
            for end in opened(fd):
                self._tries_soon &= try_soon(end, self._silence)
        for peer in ranks:
            if peer != rank:
                theirs = {" ".join(reversed(name.split(" "))) for name in parse_json(shared.get(str(peer)))}
                common = {name: fd for name, fd in mine.items() if name in theirs}
                if common:
                    self._known[peer] = {**self._known.get(peer, {}), **common}
        self.look()
        return result

    def waits(self, deadlines: Deadlines, peers: Iterable[int]) -> Deadlines:
        """`deadlines`, or longer ones for long transfers if the connection to some peer cannot be observed."""
        if all(peer in self._known for peer in peers):
            return deadlines
        return replace(deadlines, slowest_link=min(deadlines.slowest_link, _UNSEEN))

    def look(self) -> None:
        """Ask the kernel, unless that was done a moment ago."""
        now = time.monotonic()
        if now - self._looked < GLANCE or not self._looking.acquire(blocking=False):
            return
        try:
            self._looked = now
            # A copy, as in `moved` and `last`: another thread may be adding a peer.
            for peer, known in list(self._known.items()):
                silence = self._silence if self._tries_soon else None
                looks = [look for name, fd in known.items() if (look := _look(fd, name, silence)) is not None]
                self._note(peer, looks, now)
        finally:
            self._looking.release()

    def moved(self) -> int:
        """Bytes that this worker's connections have carried so far, as of the last look."""
        self.look()
        return sum(list(self._moved.values()))

    def link_estimate(self) -> LinkEstimate | None:
        """The estimate of the slowest connection to another machine; None if none is known."""
        known = [(name, fd) for names in self._known.values() for name, fd in names.items() if is_far(name)]
        rates = [look.rate for name, fd in known if (look := _look(fd, name)) is not None and look.rate is not None]
        return LinkEstimate(min(rates, default=None), self._tries_soon) if known else None

    def set_counts(self, counts: Sequence[int]) -> None:
        """A launcher's report: by rank, the bytes that each worker has moved."""
        for worker, count in enumerate(counts):
            if count != self._others.get(worker, (0, 0.0))[0]:
                self._others[worker] = count, time.monotonic()

    def lose(self, peer: int, why: str) -> None:
        """Count `peer` as lost from now on, so that no transfer waits for it."""
        self._losses.setdefault(peer, why)

    def notify_blocked(self, peers: Collection[int | None], seconds: float) -> None:
        """A transfer has been blocked for `seconds` because nothing arrives from `peers`; called at each look."""

    def loss_of(self, peer: int | None) -> str | None:
        """Why nothing more will arrive from a peer; None if something may."""
        return None if peer is None else self._losses.get(peer)

    def last(self, peer: int | None) -> float:
        """When a byte last moved to or from a peer (None: any), host clock; -inf if its connection is not observed."""
        if peer is None:
            return max(list(self._at.values()), default=-math.inf)
        return self._at.get(peer, -math.inf)

    def last_elsewhere(self, peer: int | None) -> float:
        """When a peer last moved a byte between itself and anyone, by its own report; -inf if it still lacks data."""
        if peer is None or peer not in self._idle or peer not in self._others:
            return -math.inf
        return self._others[peer][1]

    def retry_in(self, peer: int | None) -> float:
        """Seconds until the kernel retransmits to a peer that did not acknowledge; else 0."""
        return 0.0 if peer is None else self._again.get(peer, 0.0)

    def _note(self, peer: int, looks: Sequence[ConnectionState], now: float) -> None:
        if not looks:
            if now - self._closed.setdefault(peer, now) > _CLOSED:
                self.lose(peer, "the connection to it is closed")
            return
        moved = sum(look.moved for look in looks)
        if moved != self._moved.get(peer):
            self._moved[peer], self._at[peer] = moved, now
        self._again[peer] = max(look.retry_in for look in looks)
        (self._idle.add if all(look.is_idle for look in looks) else self._idle.discard)(peer)


def connections() -> dict[str, int]:
    """Descriptors of this process's TCP connections by `ConnectionState.name`; empty if the kernel does not report."""
    return {look.name: fd for fd, look in looks().items()}


def _look(fd: int, name: str, silence: float | None = None) -> ConnectionState | None:
    """The state of connection `name` behind a descriptor; None if it is closed. silence: set the kernel's time-out."""
    for end in opened(fd):
        look = connection_state(end)
        if look is not None and look.name == name:
            if silence is not None:
                keep_trying(end, look, silence)
            return look
    return None


_LOOK = "look"  # wakes the driver's thread to begin looking

_CHAIN = 20  # most deadlines to wait for a peer that moves bytes only between itself and others


class PostedWork:
    """One message in flight; only the first call of `finished` counts. now: the worker's clock."""

    def __init__(self, peer: int | None, buffer: Any, now: Callable[[], float]) -> None:
        self.peer = peer
        self.at = math.inf
        self.error: Exception | None = None
        self._now = now
        self._buffer = buffer  # the buffer must live until the message is done
        self._lock = threading.Lock()  # a waiter thread may end it while the driver begins to watch it
        self._done = False
        self._watcher: Watch | None = None

    def done(self) -> bool:
        return self._done

    def finished(self, error: Exception | None = None) -> None:
        """Mark as done (or failed) and notify the waiting transfer."""
        with self._lock:
            if self._done:  # ended before, because its peer was lost
                return
            self.at, self.error, self._buffer = self._now(), error, None
            self._done = True  # last, because `done` reads it without the lock
            watcher = self._watcher
        # Outside of the lock: the watch has one of its own, and the two are never held together.
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
    """See `isles.comm.transport.WaitEvent`. It cannot fail: a loss sets it, too."""

    def set(self) -> None:
        super().finished()

    def finished(self, error: Exception | None = None) -> None:
        self.set()


class Watch:
    """Counts the works of one yield, and wakes its transfer when `needed` are done or one has failed."""

    def __init__(self, transfer: BackgroundTransfer, works: Sequence[PostedWork], needed: int) -> None:
        self.transfer, self.works = transfer, works
        self._lock = threading.Lock()  # works end in waiter threads, also while this object is being made
        self._needed = needed
        self._is_starting = True  # until `released`: do not wake the transfer while this object is being made
        self._woken = False
        for work in works:
            if not work.watch(self):
                self.one_done()

    def released(self) -> bool:
        """Allow wake-ups from now on; True if there is nothing left to wait for."""
        with self._lock:
            self._is_starting = False
            return self._wakes()

    def one_done(self) -> None:
        with self._lock:
            self._needed -= 1
            wakes = self._wakes()
        # Woken only: the protocol's next step must not run in a waiter's thread.
        if wakes:
            self.transfer.driver.wake(self.transfer)

    def _wakes(self) -> bool:
        """Whether the wait is over and was not reported yet. Under the lock: True once."""
        if self._is_starting or self._woken or (self._needed > 0 and self.outcome() is None):
            return False
        self._woken = True
        return True

    def outcome(self) -> Exception | None:
        return next((work.error for work in self.works if work.error is not None), None)

    def late(self) -> list[PostedWork]:
        return [work for work in self.works if not work.done()]


class BackgroundTransfer:
    """A protocol in progress. See `isles.comm.transport.Transfer`."""

    def __init__(self, driver: Driver, steps: Steps[Any], channel: Channel, deadline: float, traffic: Traffic) -> None:
        self.driver, self.channel, self.seconds, self.traffic = driver, channel, deadline, traffic
        self.threads = torch.get_num_threads()  # the caller's present number
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
                except Exception as failure:  # any exception of the protocol is raised in `wait`
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
                self.driver.liveness.glances += 1
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
        """End the works with lost peers."""
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
        # Result and counters before the event: `wait` reads them as soon as it is set, without the lock.
        self.traffic.transfer(self.channel, self._began, self.driver.now())
        self._ended.set()
        self.driver.under_way.discard(self)


class Driver:
    """The thread that steps transfers whose works are done, and checks liveness while any is in progress.

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
        self.under_way.add(transfer)
        # After `add`: a driver that wakes up before it would see nothing under way, and sleep again. Always: the last
        # other transfer may end at any moment, and the driver then sleeps without looking at liveness.
        self._ready.put(_LOOK)
        # Here and not in the driver: messages leave in the order in which transfers are started.
        transfer.advance()
        return transfer

    def wake(self, transfer: BackgroundTransfer) -> None:
        self._ready.put(transfer)

    def close(self) -> None:
        """Let the thread end after the steps that are ready."""
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
            # A copy, because callers add transfers meanwhile.
            self.liveness.look()
            for transfer in list(self.under_way):
                transfer.give_up_lost()


WaiterJob = Callable[[], Callable[[], None]]
"""Waits, and returns a function that reports the end; neither raises."""


class Waiters:
    """A pool that never queues: a job gets an idle thread, or a new one."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[WaiterJob | None]] = []
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()  # guards the idle list, which callers and waiters change
        self._closed = False

    def submit(self, job: WaiterJob) -> None:
        """Run `job` on a thread of its own. The thread is idle again before the job reports: a caller that then has
        another job finds it, so there are never more threads than simultaneous jobs.
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
            del job, report  # an idle thread must not hold a message's buffer alive
            if closed:
                return


class OnHostClock:
    """A transport on the host's clock: computing takes its real time, and there is no state to save."""

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
