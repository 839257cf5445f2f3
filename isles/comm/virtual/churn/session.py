"""Sessions of a run on the virtual clock, as `isles.comm.elastic.session.Session` is one between processes.

    ask          takes `WAY` there and `WAY` back; none after `BACK` where nobody serves, or the asker is cut off
    later        an event of the timeline
    condition    the turn of a worker, whose `wait_for` blocks in virtual time

What is for a paused worker comes when it is back, what is for a dead one never.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from itertools import count
from typing import Any

import torch

from isles.comm.elastic.control import Answered, Query
from isles.comm.elastic.guards.refusals import Refusals
from isles.comm.tags import Tag
from isles.comm.virtual.scheduler import Scheduler, VirtualWorker
from isles.comm.virtual.transfer import VirtualWork
from isles.comm.virtual.wire import VirtualWire
from isles.network.engine import ARRIVED, LAST, Event, EventQueue

WAY = 0.02
"""Seconds that a word takes."""
BACK = 0.5
"""Seconds until a worker finds the lighthouse again."""
_LONG = 1024  # bytes from which on an answer of one worker to another takes what the links say
_NUMBERS = 1 << 30  # of such messages, apart from those of control


class VirtualNetwork:
    """Where all sessions of a run meet; long answers of one worker to another go over `wire`. cut: seats that reach
    nobody now. asked: called when a question has been dealt with.
    """

    def __init__(self, scheduler: Scheduler, wire: VirtualWire) -> None:
        self.scheduler, self.timeline, self._wire = scheduler, scheduler.timeline, wire
        self._carried = count(_NUMBERS)
        self.cut: set[int] = set()
        self.asked: Callable[[], None] = lambda: None
        self.serving: dict[str, tuple[VirtualSession, Callable[[Query], None]]] = {}
        self.watching: list[tuple[VirtualSession, str, Callable[[str, bool], None]]] = []

    def served(self, key: str) -> tuple[VirtualSession, Callable[[Query], None]] | None:
        """By whom `key` is served now, and how."""
        found = self.serving.get(key)
        return found if found is not None and found[0].is_open else None

    def carry(self, source: int, target: int, data: bytes, come: Callable[[bool], None]) -> None:
        """Over the lines of both workers; `come` is told whether it has come."""
        workers, tag = self.scheduler.workers, Tag("control", next(self._carried))
        out = torch.empty(len(data), dtype=torch.uint8, device="cpu")
        receive = VirtualWork(workers[target], source, out, None)
        receive.waiter = _Carried(come)
        self._wire.recv(target, source, tag, receive)
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._wire.send(source, target, sent, tag, VirtualWork(workers[source], target, None, None))

    def seen(self, key: str, there: bool) -> None:
        """What is present under `key` comes or goes, now."""
        for session, keys, changed in [*self.watching]:
            if session.is_open and fnmatchcase(key, keys):
                changed(key, there)


class _Carried:
    """Waits for a message."""

    def __init__(self, come: Callable[[bool], None]) -> None:
        self._come = come

    def one_done(self, work: VirtualWork) -> None:
        """It has come, or never will."""
        self._come(work.error is None)


class _Aside:
    """See `isles.comm.elastic.control.SideWork`; it takes no time."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.start = work

    def join(self, timeout: float | None = None) -> None:
        """It is done."""


class VirtualQuery:
    """See `isles.comm.elastic.control.Query`."""

    def __init__(self, payload: bytes, attachment: bytes, answer: Answered) -> None:
        self.payload, self.attachment, self._answer = payload, attachment, answer

    def reply(self, data: bytes | Callable[[], bytes] = b"") -> None:
        self._answer(data if isinstance(data, bytes) else data(), None)

    def refuse(self, why: bytes) -> None:
        self._answer(None, why)


class VirtualTimer:
    """See `isles.comm.elastic.control.Timer`."""

    def __init__(self, timeline: EventQueue, event: Event) -> None:
        self._timeline = timeline
        self._event: Event | None = event

    def cancel(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            self._timeline.cancel(event)


class _Sleep:
    """What a worker that waits is blocked on."""

    error: BaseException | None = None

    def fail(self, error: Exception) -> None:
        """Nobody is left who could wake it."""
        self.error = error


class VirtualCondition:
    """See `isles.comm.elastic.control.Condition`. worker: who may wait on it; None: nobody."""

    def __init__(self, scheduler: Scheduler, worker: VirtualWorker | None) -> None:
        self._scheduler, self._worker = scheduler, worker
        self._sleep: _Sleep | None = None

    def __enter__(self) -> None:
        if self._worker is not None:
            self._worker.__enter__()

    def __exit__(self, kind: Any, error: Any, at: Any, /) -> None:
        if self._worker is not None:
            self._worker.__exit__(kind, error, at)

    def notify_all(self) -> None:
        """In a turn, or an event: whoever waits looks again."""
        if self._sleep is not None:
            self._wake(self._sleep)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """In the worker's own turn, which others have meanwhile."""
        worker, scheduler = self._worker, self._scheduler
        assert worker is not None and not scheduler.depth, "a worker's own thread waits, and holds nothing else"
        until = math.inf if timeout is None else worker.clock + timeout
        while not (is_over := predicate()) and worker.clock < until:
            sleep = self._sleep = _Sleep()
            end = [scheduler.timeline.at(worker.back(until), LAST, worker.rank, self._wake, sleep)] * (until < math.inf)
            scheduler.block(worker, sleep)
            for event in end:
                scheduler.timeline.cancel(event)
            if sleep.error is not None:
                raise sleep.error
            scheduler.turn_anew(worker)
        return is_over

    def _wake(self, sleep: _Sleep) -> None:
        worker, timeline = self._worker, self._scheduler.timeline
        if worker is None or worker.awaits is not sleep:
            return
        back = worker.back(timeline.now)
        if back > timeline.now:  # a paused worker hears of it when it is back
            timeline.at(back, ARRIVED, worker.rank, self._wake, sleep)
            return
        self._sleep = None
        self._scheduler.wake(worker)


class VirtualSession:
    """See `isles.comm.elastic.control.ControlSession`. worker: whose it is; None: the lighthouse's, which is never
    paused and waits for nothing.
    """

    beats = False

    relayed = 0

    def __init__(self, network: VirtualNetwork, worker: VirtualWorker | None = None) -> None:
        self.refused, self.taken, self.is_open = Refusals(), 0, True
        self._network, self._worker, self._timeline = network, worker, network.timeline
        self._rank = -1 if worker is None else worker.rank

    def now(self) -> float:
        worker = self._worker
        return self._timeline.now if worker is None or self._network.scheduler.is_held else worker.clock

    wall = now

    def condition(self) -> VirtualCondition:
        return VirtualCondition(self._network.scheduler, self._worker)

    def later(self, call: Callable[[], None], seconds: float = 0.0) -> VirtualTimer:
        with self.condition():
            return VirtualTimer(self._timeline, self._at(self._timeline.now + seconds, self._rank, call))

    def aside(self, work: Callable[[], None]) -> _Aside:
        return _Aside(work)

    def serve(self, key: str, answer: Callable[[Query], None]) -> None:
        self._network.serving[key] = self, answer

    def ask(
        self,
        key: str,
        payload: bytes,
        answered: Answered,
        *,
        attachment: bytes | None = None,
        seconds: float,
        urgent: bool = False,
    ) -> None:
        network, timeline, once = self._network, self._timeline, [answered]

        def settle(reply: bytes | None, refusal: bytes | None) -> None:
            if once:
                once.pop()(reply, refusal)

        def arrive() -> None:
            found = None if self._rank in network.cut else network.served(key)
            if found is None:
                self._at(timeline.now + BACK, self._rank, partial(settle, None, None))
                return
            other, answer = found

            def answer_with(reply: bytes | None, refusal: bytes | None) -> None:
                if reply is not None and len(reply) > _LONG and min(self._rank, other._rank) >= 0:
                    network.carry(other._rank, self._rank, reply, lambda come: settle(reply if come else None, None))
                else:
                    self._at(timeline.now + WAY, max(self._rank, other._rank), partial(settle, reply, refusal))
                answers.append(reply)

            answers: list[bytes | None] = []
            answer(VirtualQuery(payload, attachment or b"", answer_with))
            if not answers or len(answers[0] or b"") > _LONG:
                self._at(timeline.now + seconds, self._rank, partial(settle, None, None))
            network.asked()

        with self.condition():
            found = network.served(key)
            to = self if found is None else found[0]
            timeline.at(to.back(timeline.now + WAY), ARRIVED, max(self._rank, to._rank), arrive)

    def present(self, key: str) -> None:
        """Whoever has events happen says who is there, see `VirtualNetwork.seen`."""

    def watch(self, keys: str, changed: Callable[[str, bool], None]) -> None:
        self._network.watching.append((self, keys, changed))

    def seen(self, name: str) -> str:
        return name

    def back(self, time: float) -> float:
        """`time` if its worker is not paused then, else when it is back."""
        return time if self._worker is None else self._worker.back(time)

    def close(self) -> None:
        """Be gone: nothing comes any more."""
        self.is_open = False

    def _at(self, time: float, rank: int, call: Callable[[], None]) -> Event:
        def act() -> None:
            if self.is_open:
                call()

        return self._timeline.at(self.back(time), ARRIVED, rank, act)
