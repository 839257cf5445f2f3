"""What becomes of a run on the virtual clock through a trace's joins, deaths, pauses and outages.

    join          a seat, at the start of the worker's thread
    kill          its thread ends and what is on its line is lost; `_TOLD` later the others' connections break
    pause         a lease later the connection counts as broken, until it is back
    leave         the worker is told to
    lighthouse    away: no questions are answered; then another one goes on from its journal

The lighthouse, and the lines to it, are those between processes (`Lighthouse`, `Company`), over sessions of the virtual
clock (`session`); between workers messages take what the links say. Who waits is asked again when something has
changed, as if it had asked all the time.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from typing_extensions import override

from isles.comm.elastic.calls import RoundsAssembly
from isles.comm.elastic.company import Company
from isles.comm.elastic.gifts.giving import Giver
from isles.comm.elastic.guards.presence import SILENT
from isles.comm.elastic.journal import Journal
from isles.comm.elastic.keys import LIGHTHOUSE, SeatKeys
from isles.comm.elastic.lighthouse import GRACE, Lighthouse
from isles.comm.elastic.messages import Entry, Over
from isles.comm.elastic.orders import Rules
from isles.comm.errors import PeerLost
from isles.comm.virtual.churn.presence import KnownPresence
from isles.comm.virtual.churn.session import BACK, VirtualNetwork, VirtualSession
from isles.comm.virtual.scheduler import Scheduler
from isles.comm.virtual.transport import VirtualTransport
from isles.comm.virtual.wire import VirtualWire
from isles.network.churn import ChurnEvent
from isles.network.engine import ARRIVED

_TOLD = 0.2  # seconds until a death is noticed


class _Memory(Journal):
    """A journal that is never on a disk."""

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        self.entries = entries

    @override
    def append(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)

    @override
    def commit(self) -> None: ...


class _Keys(SeatKeys):
    """Which nobody is to know, as nobody else is here."""

    def __init__(self) -> None:
        self._secret = bytes(32)


class VirtualMeeting:
    """A run of `rules` through the changes of `trace`; `journal` gets what its lighthouses must not forget. lease:
    seconds of silence after which a connection counts as broken. heard: called with what workers report.

    counts: what happened. lives: by seat (its start, its end) in seconds; an end of None: until the end of the run.
    finished: seats that have done the last round. is_over: whether all members have.
    """

    def __init__(
        self, rules: Rules, trace: Sequence[ChurnEvent], lease: float, heard: Callable[[int, Any], None]
    ) -> None:
        self.rules, self.trace, self.lease, self._heard = rules, trace, lease, heard
        self.journal: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.lives: dict[int, tuple[float, float | None]] = {}
        self.companies: dict[int, Company] = {}
        self.finished: set[int] = set()
        self.is_over = False
        self._paused_at: dict[int, float] = {}
        self._lighthouse: Lighthouse | None = None
        self._ticks_at = -1.0

    def open(self, scheduler: Scheduler, wire: VirtualWire, transports: Sequence[VirtualTransport]) -> None:
        """Before the workers' threads begin: have everything happen at its time."""
        self.scheduler, self.wire, self.transports = scheduler, wire, transports
        self.timeline, self.network = scheduler.timeline, VirtualNetwork(scheduler, wire)
        self.network.asked = self._asked
        self._cut, self._keys = self.network.cut, _Keys()
        self.sessions = [VirtualSession(self.network, worker) for worker in scheduler.workers]
        self.leaving = [threading.Event() for _ in scheduler.workers]
        self._seated = [session.condition() for session in self.sessions]
        self._light(RoundsAssembly(self.rules))
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
    def membership(self) -> RoundsAssembly | None:
        """The lighthouse's; None while it is away."""
        return None if self._lighthouse is None else self._assembly

    def seated(self, seat: int) -> Company | None:
        """The line of the worker in `seat`, for its thread, once it has that seat; None: the run is over before."""
        with self._seated[seat]:
            self._seated[seat].wait_for(lambda: seat in self.companies or self.is_over)
        return None if self.is_over else self.companies[seat]

    def alive(self) -> list[int]:
        """Seats that have come and are neither dead nor gone."""
        return [seat for seat, (_, end) in self.lives.items() if end is None]

    def gone(self, seat: int) -> None:
        """`seat` has ended by itself."""
        if not self.is_over:
            self.lives[seat] = self.lives[seat][0], self.timeline.now
            self.sessions[seat].close()
            self._break(seat)

    def end(self) -> None:
        """The run is over for all."""
        self.is_over = True
        (self._lighthouse or self._light(self._assembly)).tell(self.alive(), Over())
        for seated in self._seated:
            seated.notify_all()

    # Events

    def _at(self, seconds: float, act: Callable[[], None]) -> None:
        self.timeline.at(seconds, ARRIVED, -1, act)

    def _once_there(self, seat: int, act: Callable[[int], None]) -> None:
        """Where the lighthouse is away a worker gets its seat late, and what happens to it happens after that."""
        if self.is_over:
            return
        if seat not in self.lives:
            self._at(self.timeline.now + BACK, partial(self._once_there, seat, act))
        elif self.lives[seat][1] is None:
            act(seat)

    def _join(self, seat: int) -> None:
        if self.is_over:
            return
        if self._lighthouse is None or seat > len(self.lives):  # seats are given in the order of those who come
            self._at(self.timeline.now + BACK, partial(self._join, seat))
            return
        self.lives[seat] = self.timeline.now, None
        self._lighthouse.act(lambda now: self._assembly.join(now, "virtual"))
        entry = Entry(seat, self._keys.of(seat))
        company = self.companies[seat] = Company(self.sessions[seat], entry)
        company.waits = self.transports[seat]
        self.transports[seat].doubt = partial(self._doubt, company)
        for other in self.lives:
            if self.lives[other][1] is not None or other in self._cut:
                company.connection(other, broken=True)
        self._seated[seat].notify_all()

    def _kill(self, seat: int) -> None:
        self.counts["deaths"] += 1
        self.lives[seat] = self.lives[seat][0], self.timeline.now
        self.sessions[seat].close()
        self.wire.dead(seat)
        self.transports[seat].died(self.timeline.now, PeerLost(seat, "it died"))
        self.scheduler.kill(self.scheduler.workers[seat])
        self._at(self.timeline.now + _TOLD, partial(self._break, seat))

    def _break(self, seat: int) -> None:
        self._cut.add(seat)
        self.wire.cut(seat, "its connection broke")
        for other in self.alive():
            if other != seat:
                self.companies[other].connection(seat, broken=True)
        self._seen(seat, there=False)
        self._look()

    def _seen(self, seat: int, *, there: bool) -> None:
        """The lighthouse, where it is there, is told of a connection."""
        self.network.seen(f"isles/seat/{seat}", there)
        self._mind_graces()

    def _leave(self, seat: int) -> None:
        self.counts["leaves"] += 1
        self.leaving[seat].set()

    def _pause(self, seat: int) -> None:
        self.counts["pauses"] += 1
        now = self._paused_at[seat] = self.timeline.now
        back = self.scheduler.workers[seat].back(now)
        if back > now + self.lease:
            self._at(now + self.lease, partial(self._once_there, seat, self._break))
        if back > now + SILENT:
            self._at(now + SILENT, partial(self._once_there, seat, lambda _: self._tick()))

    def _resume(self, seat: int) -> None:
        if seat in self._cut:
            self._cut.discard(seat)
            self.wire.mend(seat)
            for other in self.alive():
                if other not in self._cut:
                    self.companies[other].connection(seat, broken=False)
            self._seen(seat, there=True)
        self._poke(seat)

    def _doubt(self, company: Company, seat: int) -> None:
        """`company` waits for `seat`: that one has just spoken, if it is there, so nobody need be asked."""
        if self.scheduler.workers[seat].back(self.timeline.now) > self.timeline.now:
            company.doubt(seat)

    def _tick(self) -> None:
        if self._lighthouse is not None:
            self._lighthouse.tick()
            self._mind_graces()

    def _outage(self, seconds: float) -> None:
        if self.is_over or self._lighthouse is None:
            return
        self.counts["outages"] += 1
        self._lighthouse.close()
        self._session.close()
        self._lighthouse = None
        self._at(self.timeline.now + seconds, self._restart)

    def _light(self, assembly: RoundsAssembly) -> Lighthouse:
        self._assembly, self._newest = assembly, assembly.newest_round
        self._session = VirtualSession(self.network)
        self._lighthouse = Lighthouse(
            self._session,
            assembly,
            _Memory(self.journal),
            self._keys,
            config="",
            version="",
            heard=self._heard,
            presence=KnownPresence(self.scheduler, self._paused_at),
        )
        Giver(self._session, LIGHTHOUSE, lambda line: None, comes=lambda what: False)  # it keeps no states
        return self._lighthouse

    def _restart(self) -> None:
        now = self.timeline.now
        self._light(RoundsAssembly(self.rules, self.journal, until=now + GRACE))
        for seat in self.alive():
            if seat not in self._cut:
                self._at(now + BACK, partial(self._return, seat))
        self._session.later(self._tick, GRACE)

    def _return(self, seat: int) -> None:
        if self._lighthouse is not None and self.lives[seat][1] is None and seat not in self._cut:
            self._seen(seat, there=True)
            self._poke(seat)

    def _poke(self, seat: int) -> None:
        with self.companies[seat].changed:
            self.companies[seat].poke()

    # Words

    def _asked(self) -> None:
        """The lighthouse has dealt with a word."""
        if self._lighthouse is None:
            return
        self._mind_graces()
        if self._assembly.finished:
            self.finished |= self._assembly.finished
            self._look()
        if self._assembly.newest_round > self._newest:
            self._newest = self._assembly.newest_round
            for seat in self.alive():
                if self.companies[seat].is_waiting:
                    self._poke(seat)

    def _mind_graces(self) -> None:
        """Tick when the next one ends."""
        end = self._assembly.ballots.graces.next
        if self._lighthouse is not None and end is not None and end > self.timeline.now and end != self._ticks_at:
            self._ticks_at = end
            self._session.later(self._tick, end - self.timeline.now)

    def _look(self) -> None:
        """The run is over once all that are in it have done their last round."""
        if self.is_over or self._lighthouse is None:
            return
        members = self._assembly.members()
        if members and set(members) <= self.finished:
            self.end()
