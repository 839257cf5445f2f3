"""A run on the virtual clock through a trace's joins, deaths, pauses and outages of the lighthouse.

    join          a member id, at the start of the worker's thread
    kill          its thread ends and its messages in flight are lost; `_NOTICED` later the others' connections break
    pause         a lease later the connection counts as broken, until it is back
    leave         the worker is asked to leave
    lighthouse    away: no requests are answered; then a new one continues from its journal

Lighthouse and clients are the real ones (`Lighthouse`, `MembershipClient`), over sessions of the virtual clock.
Messages between workers take the time of their links.

    ask          takes `WAY` there and `WAY` back; no reply after `BACK` if nobody serves, or the asker is cut off
    later        an event of the timeline
    condition    the turn of a worker, whose `wait_for` blocks in virtual time: a waiting worker checks again after each
                 change, as if it had checked all the time

Messages for a paused worker arrive when it resumes, messages for a dead one never.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import count
from typing import Any

import torch
from typing_extensions import override

from isles.comm.errors import PeerLost
from isles.comm.tags import Tag
from isles.comm.virtual.cluster import VirtualTransport
from isles.comm.virtual.scheduler import Scheduler, VirtualWorker
from isles.comm.virtual.wire import VirtualWire, VirtualWork
from isles.membership.client import MembershipClient
from isles.membership.coordinator import RoundsCoordinator
from isles.membership.effects import Rules
from isles.membership.failure_detector import SILENT, FailureDetector
from isles.membership.keys import LIGHTHOUSE, MemberKeys
from isles.membership.lighthouse import GRACE, Journal, Lighthouse
from isles.membership.messages import Entry, Over
from isles.membership.requests import BEAT
from isles.membership.session import Answered, Query, Rejections
from isles.membership.state_transfer import StateServer
from isles.network.churn import ChurnEvent
from isles.network.engine import ARRIVED, LAST, Event

WAY = 0.02
"""Seconds that a control message takes."""
BACK = 0.5
"""Seconds until a worker finds the lighthouse again."""
_LONG = 1024  # bytes from which on a reply between workers takes the time of their links
_NUMBERS = 1 << 30  # their tags begin here, apart from those of control messages


class SimulatedNetwork:
    """Connects all sessions of a run; long replies between workers go over `wire`. cut: members that reach nobody now.
    asked: called after a question was handled.
    """

    def __init__(self, scheduler: Scheduler, wire: VirtualWire) -> None:
        self.scheduler, self.timeline, self._wire = scheduler, scheduler.timeline, wire
        self._carried = count(_NUMBERS)
        self.cut: set[int] = set()
        self.asked: Callable[[], None] = lambda: None
        self.serving: dict[str, tuple[SimulatedSession, Callable[[Query], None]]] = {}
        self.watching: list[tuple[SimulatedSession, str, Callable[[str, bool], None]]] = []

    def served(self, key: str) -> tuple[SimulatedSession, Callable[[Query], None]] | None:
        """The session that serves `key` now, and its callback."""
        entry = self.serving.get(key)
        return entry if entry is not None and entry[0].is_open else None

    def carry(self, source: int, target: int, data: bytes, come: Callable[[bool], None]) -> None:
        """Send `data` over the links of both workers; `come` is called with whether it has arrived."""
        workers, tag = self.scheduler.workers, Tag("control", next(self._carried))
        out = torch.empty(len(data), dtype=torch.uint8, device="cpu")
        receive = VirtualWork(workers[target], source, out, None)
        receive.waiter = lambda work: come(work.error is None)
        self._wire.recv(target, source, tag, receive)
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._wire.send(source, target, sent, tag, VirtualWork(workers[source], target, None, None))

    def seen(self, key: str, there: bool) -> None:
        """Notify watchers that something is present under `key`, or not any more."""
        for session, keys, changed in [*self.watching]:
            if session.is_open and fnmatchcase(key, keys):
                changed(key, there)


class _Sleep:
    """What a waiting worker is blocked on."""

    error: BaseException | None = None

    def fail(self, error: Exception) -> None:
        """No worker is left that could wake it."""
        self.error = error


class SimulatedCondition:
    """See `isles.membership.session.Condition`. worker: the only one that may wait on it; None: none may."""

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
        """Called in a turn or an event: the waiting worker checks its predicate again."""
        if self._sleep is not None:
            self._wake(self._sleep)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Called in the worker's own turn; others have turns meanwhile."""
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
            scheduler.retake_turn(worker)
        return is_over

    def _wake(self, sleep: _Sleep) -> None:
        worker, timeline = self._worker, self._scheduler.timeline
        if worker is None or worker.awaits is not sleep:
            return
        back = worker.back(timeline.now)
        if back > timeline.now:  # a paused worker wakes up when it resumes
            timeline.at(back, ARRIVED, worker.rank, self._wake, sleep)
            return
        self._sleep = None
        self._scheduler.wake(worker)


class SimulatedSession:
    """See `isles.membership.session.ControlSession`. worker: its owner; None: the lighthouse, which is never paused and
    never waits.
    """

    beats = False

    relayed = 0

    def __init__(self, network: SimulatedNetwork, worker: VirtualWorker | None = None) -> None:
        self.refused, self.taken, self.is_open = Rejections(), 0, True
        self._network, self._worker, self._timeline = network, worker, network.timeline
        self._rank = -1 if worker is None else worker.rank

    def now(self) -> float:
        worker = self._worker
        return self._timeline.now if worker is None or self._network.scheduler.is_held else worker.clock

    wall = now

    def condition(self) -> SimulatedCondition:
        return SimulatedCondition(self._network.scheduler, self._worker)

    def later(self, call: Callable[[], None], seconds: float = 0.0) -> Callable[[], None]:
        with self.condition():
            return partial(self._timeline.cancel, self._at(self._timeline.now + seconds, self._rank, call))

    def aside(self, work: Callable[[], None]) -> Callable[[float], None]:
        work()
        return lambda seconds: None

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
            server = None if self._rank in network.cut else network.served(key)
            if server is None:
                self._at(timeline.now + BACK, self._rank, partial(settle, None, None))
                return
            other, answer = server

            def answer_with(reply: bytes | None, refusal: bytes | None) -> None:
                if reply is not None and len(reply) > _LONG and min(self._rank, other._rank) >= 0:
                    network.carry(other._rank, self._rank, reply, lambda come: settle(reply if come else None, None))
                else:
                    self._at(timeline.now + WAY, max(self._rank, other._rank), partial(settle, reply, refusal))
                answers.append(reply)

            answers: list[bytes | None] = []
            answer(Query(payload, attachment or b"", answer_with))
            if not answers or len(answers[0] or b"") > _LONG:
                self._at(timeline.now + seconds, self._rank, partial(settle, None, None))
            network.asked()

        with self.condition():
            server = network.served(key)
            to = self if server is None else server[0]
            timeline.at(to.back(timeline.now + WAY), ARRIVED, max(self._rank, to._rank), arrive)

    def present(self, key: str) -> None:
        """Nothing to do: the simulated events report who is present, see `SimulatedNetwork.seen`."""

    def watch(self, keys: str, changed: Callable[[str, bool], None]) -> None:
        self._network.watching.append((self, keys, changed))

    def seen(self, name: str) -> str:
        return name

    def back(self, time: float) -> float:
        """`time`, or when its worker resumes if that is paused then."""
        return time if self._worker is None else self._worker.back(time)

    def close(self) -> None:
        """Handle nothing more."""
        self.is_open = False

    def _at(self, time: float, rank: int, call: Callable[[], None]) -> Event:
        def act() -> None:
            if self.is_open:
                call()

        return self._timeline.at(self.back(time), ARRIVED, rank, act)


class SimulatedFailureDetector(FailureDetector):
    """Takes workers that are not paused to have sent a beat now, paused ones half a beat before their pause. paused_at:
    by member, its last pause.
    """

    def __init__(self, scheduler: Scheduler, paused_at: Mapping[int, float]) -> None:
        super().__init__()
        self._scheduler, self._paused_at = scheduler, paused_at

    @override
    def to_notify(self, member: int) -> list[int]:
        self._pass(self._scheduler.timeline.now)
        return super().to_notify(member)

    @override
    def _pass(self, at: float) -> None:
        self._now, workers = at, self._scheduler.workers
        for member in self._spoke_at:
            is_paused = workers[member].back(at) > at
            self._spoke_at[member] = self._paused_at.get(member, at) - BEAT / 2 if is_paused else at


_NOTICED = 0.2  # seconds until the others notice a death


class _Memory(Journal):
    """A journal in memory."""

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        self.entries = entries

    @override
    def append(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)

    @override
    def commit(self) -> None: ...


class _Keys(MemberKeys):
    """Keys that need no secret: there is no other process."""

    def __init__(self) -> None:
        self._secret = bytes(32)


class SimulatedMembership:
    """A run of `rules` through the changes of `trace`. journal: of its lighthouses. lease: seconds of silence after
    which a connection counts as broken. on_report: called with workers' reports.

    counts: of events by kind. incarnations: by member (start, end) in seconds; end None: not ended yet. finished:
    members that have done the last round. is_over: whether all members have.
    """

    def __init__(
        self, rules: Rules, trace: Sequence[ChurnEvent], lease: float, on_report: Callable[[int, Any], None]
    ) -> None:
        self.rules, self.trace, self.lease, self._on_report = rules, trace, lease, on_report
        self.journal: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.incarnations: dict[int, tuple[float, float | None]] = {}
        self.clients: dict[int, MembershipClient] = {}
        self.finished: set[int] = set()
        self.is_over = False
        self._paused_at: dict[int, float] = {}
        self._lighthouse: Lighthouse | None = None
        self._ticks_at = -1.0

    def open(self, scheduler: Scheduler, wire: VirtualWire, transports: Sequence[VirtualTransport]) -> None:
        """Schedule all events, before the workers' threads begin."""
        self.scheduler, self.wire, self.transports = scheduler, wire, transports
        self.timeline, self.network = scheduler.timeline, SimulatedNetwork(scheduler, wire)
        self.network.asked = self._asked
        self._cut, self._keys = self.network.cut, _Keys()
        self.sessions = [SimulatedSession(self.network, worker) for worker in scheduler.workers]
        self.leaving = [threading.Event() for _ in scheduler.workers]
        self._admitted = [session.condition() for session in self.sessions]
        self._start_lighthouse(RoundsCoordinator(self.rules))
        for worker in scheduler.workers:
            self._at(worker.clock, partial(self._join, worker.rank))
        for event in self.trace:
            act = {"kill": self._kill, "leave": self._leave, "pause": self._pause, "resume": self._resume}.get(
                event.kind
            )
            if event.kind == "lighthouse":
                self._at(event.at, partial(self._outage, event.number))
            elif act is not None:
                self._at(event.at, partial(self._once_there, int(event.number), act))

    @property
    def membership(self) -> RoundsCoordinator | None:
        """The lighthouse's coordinator; None while it is away."""
        return None if self._lighthouse is None else self._coordinator

    def admitted(self, member: int) -> MembershipClient | None:
        """The client of `member`, for its worker's thread, once it has joined; None: the run ended before."""
        with self._admitted[member]:
            self._admitted[member].wait_for(lambda: member in self.clients or self.is_over)
        return None if self.is_over else self.clients[member]

    def alive(self) -> list[int]:
        """Members that have joined, and have not ended."""
        return [member for member, (_, end) in self.incarnations.items() if end is None]

    def ended(self, member: int) -> None:
        """The worker of `member` has ended by itself."""
        if not self.is_over:
            self.incarnations[member] = self.incarnations[member][0], self.timeline.now
            self.sessions[member].close()
            self._break(member)

    def end(self) -> None:
        """End the run for all members."""
        self.is_over = True
        (self._lighthouse or self._start_lighthouse(self._coordinator)).notify(self.alive(), Over())
        for admitted in self._admitted:
            admitted.notify_all()

    # Events

    def _at(self, seconds: float, act: Callable[[], None]) -> None:
        self.timeline.at(seconds, ARRIVED, -1, act)

    def _once_there(self, member: int, act: Callable[[int], None]) -> None:
        """Call `act` once `member` has joined: while the lighthouse is away workers join late, and events follow."""
        if self.is_over:
            return
        if member not in self.incarnations:
            self._at(self.timeline.now + BACK, partial(self._once_there, member, act))
        elif self.incarnations[member][1] is None:
            act(member)

    def _join(self, member: int) -> None:
        if self.is_over:
            return
        # Members join in the order of their ids.
        if self._lighthouse is None or member > len(self.incarnations):
            self._at(self.timeline.now + BACK, partial(self._join, member))
            return
        self.incarnations[member] = self.timeline.now, None
        self._lighthouse.act(lambda now: self._coordinator.join(now, "virtual"))
        entry = Entry(member, self._keys.of(member))
        client = self.clients[member] = MembershipClient(self.sessions[member], entry)
        client.transfers = self.transports[member]
        self.transports[member].suspect = partial(self._suspect, client)
        for other in self.incarnations:
            if self.incarnations[other][1] is not None or other in self._cut:
                client.connection(other, broken=True)
        self._admitted[member].notify_all()

    def _kill(self, member: int) -> None:
        self.counts["deaths"] += 1
        self.incarnations[member] = self.incarnations[member][0], self.timeline.now
        self.sessions[member].close()
        self.wire.dead(member)
        self.transports[member].died(self.timeline.now, PeerLost(member, "it died"))
        self.scheduler.kill(self.scheduler.workers[member])
        self._at(self.timeline.now + _NOTICED, partial(self._break, member))

    def _break(self, member: int) -> None:
        self._cut.add(member)
        self.wire.cut(member, "its connection broke")
        for other in self.alive():
            if other != member:
                self.clients[other].connection(member, broken=True)
        self._seen(member, there=False)
        self._look()

    def _seen(self, member: int, *, there: bool) -> None:
        """Report a connection to the lighthouse, unless it is away."""
        self.network.seen(f"isles/member/{member}", there)
        self._schedule_graces()

    def _leave(self, member: int) -> None:
        self.counts["leaves"] += 1
        self.leaving[member].set()

    def _pause(self, member: int) -> None:
        self.counts["pauses"] += 1
        now = self._paused_at[member] = self.timeline.now
        back = self.scheduler.workers[member].back(now)
        if back > now + self.lease:
            self._at(now + self.lease, partial(self._once_there, member, self._break))
        if back > now + SILENT:
            self._at(now + SILENT, partial(self._once_there, member, lambda _: self._tick()))

    def _resume(self, member: int) -> None:
        if member in self._cut:
            self._cut.discard(member)
            self.wire.restore(member)
            for other in self.alive():
                if other not in self._cut:
                    self.clients[other].connection(member, broken=False)
            self._seen(member, there=True)
        self._beat_now(member)

    def _suspect(self, client: MembershipClient, member: int) -> None:
        """`client` waits too long for `member`. Only a paused member can be silent, so only then the lighthouse is
        asked.
        """
        if self.scheduler.workers[member].back(self.timeline.now) > self.timeline.now:
            client.suspect(member)

    def _tick(self) -> None:
        if self._lighthouse is not None:
            self._lighthouse.tick()
            self._schedule_graces()

    def _outage(self, seconds: float) -> None:
        if self.is_over or self._lighthouse is None:
            return
        self.counts["outages"] += 1
        self._lighthouse.close()
        self._session.close()
        self._lighthouse = None
        self._at(self.timeline.now + seconds, self._restart)

    def _start_lighthouse(self, assembly: RoundsCoordinator) -> Lighthouse:
        self._coordinator, self._newest = assembly, assembly.newest_round
        self._session = SimulatedSession(self.network)
        self._lighthouse = Lighthouse(
            self._session,
            assembly,
            _Memory(self.journal),
            self._keys,
            config="",
            version="",
            on_report=self._on_report,
            failure_detector=SimulatedFailureDetector(self.scheduler, self._paused_at),
        )
        self._lighthouse.open()
        StateServer(self._session, LIGHTHOUSE, lambda line: None, comes=lambda what: False)  # it keeps no states
        return self._lighthouse

    def _restart(self) -> None:
        now = self.timeline.now
        self._start_lighthouse(RoundsCoordinator(self.rules, self.journal, until=now + GRACE))
        for member in self.alive():
            if member not in self._cut:
                self._at(now + BACK, partial(self._return, member))
        self._session.later(self._tick, GRACE)

    def _return(self, member: int) -> None:
        if self._lighthouse is not None and self.incarnations[member][1] is None and member not in self._cut:
            self._seen(member, there=True)
            self._beat_now(member)

    def _beat_now(self, member: int) -> None:
        with self.clients[member].changed:
            self.clients[member].beat_now()

    # Messages

    def _asked(self) -> None:
        """The lighthouse has handled a message."""
        if self._lighthouse is None:
            return
        self._schedule_graces()
        if self._coordinator.finished:
            self.finished |= self._coordinator.finished
            self._look()
        if self._coordinator.newest_round > self._newest:
            self._newest = self._coordinator.newest_round
            for member in self.alive():
                if self.clients[member].is_waiting:
                    self._beat_now(member)

    def _schedule_graces(self) -> None:
        """Schedule a tick for the end of the next grace."""
        end = self._coordinator.ballots.graces.next
        if self._lighthouse is not None and end is not None and end > self.timeline.now and end != self._ticks_at:
            self._ticks_at = end
            self._session.later(self._tick, end - self.timeline.now)

    def _look(self) -> None:
        """End the run once all its members have done their last round."""
        if self.is_over or self._lighthouse is None:
            return
        members = self._coordinator.members()
        if members and set(members) <= self.finished:
            self.end()
