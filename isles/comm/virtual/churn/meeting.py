"""The lighthouse on the virtual clock: `Membership`, and what becomes of a trace's joins, deaths, pauses and outages.

    join          a seat, at the start of the worker's thread
    kill          its thread ends and what is on its line is lost; `_TOLD` later the others' connections break
    pause         a lease later the connection counts as broken, until it is back
    leave         the worker is told to
    lighthouse    away: no questions are answered; then `Membership` goes on from its journal

Between workers messages take what the links say; to the lighthouse and back `_WAY` each. Between two words there is
nothing to be seen: a worker that waits is asked again when something has changed, as if it had asked all the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from isles.comm.elastic.calls import call
from isles.comm.elastic.membership import Membership
from isles.comm.elastic.messages import Finished, Over
from isles.comm.elastic.orders import Order, Record, Reply, Rules, Tell
from isles.comm.errors import PeerLost
from isles.comm.virtual.churn.company import VirtualCompany
from isles.comm.virtual.scheduler import Scheduler
from isles.comm.virtual.transport import VirtualTransport
from isles.comm.virtual.wire import VirtualWire
from isles.network.churn import ChurnEvent
from isles.network.engine import ARRIVED

GRACE = 8.0  # seconds for workers to come back to a lighthouse that was started again
_TOLD, _WAY, _BACK = 0.2, 0.02, 0.5  # seconds: a death is noticed; a word's way; a worker finds the lighthouse again


class VirtualMeeting:
    """The lighthouse of a run of `rules` through the changes of `trace`; `journal` gets what must survive it. lease:
    seconds of silence after which a connection counts as broken.

    counts: what happened. lives: by seat (its start, its end) in seconds; an end of None: until the end of the run.
    is_over: whether all members have done the last round.
    """

    def __init__(self, rules: Rules, trace: Sequence[ChurnEvent], lease: float) -> None:
        self.rules, self.trace, self.lease = rules, trace, lease
        self.membership: Membership | None = None
        self.journal: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.lives: dict[int, tuple[float, float | None]] = {}
        self.companies: dict[int, VirtualCompany] = {}
        self.finished: set[int] = set()
        self._cut: set[int] = set()
        self.is_over = False
        self._ticks_at = -1.0

    def open(self, scheduler: Scheduler, wire: VirtualWire, transports: Sequence[VirtualTransport]) -> None:
        """Before the workers' threads begin: have everything happen at its time."""
        self.scheduler, self.wire, self.transports = scheduler, wire, transports
        self.timeline = scheduler.timeline
        self.membership = Membership(self.rules)
        for worker in scheduler.workers:
            self.companies[worker.rank] = VirtualCompany(self, worker)
            self._at(worker.clock, partial(self._join, worker.rank))
        for event in self.trace:
            act = {"kill": self._kill, "leave": self._leave, "pause": self._pause, "resume": self._resume}.get(
                event.kind
            )
            if event.kind == "lighthouse":
                self._at(event.at, partial(self._outage, event.number))
            elif act is not None:
                self._at(event.at, partial(self._once_there, int(event.number), act))

    def ask(self, seat: int, message: Any, answered: Callable[[Any], None]) -> None:
        """A question of a worker, now. `answered` gets the reply, or None where the lighthouse is away."""
        self.timeline.at(self.timeline.now + _WAY, ARRIVED, seat, self._asked, seat, message, answered)

    def alive(self) -> list[int]:
        """Seats that have come and are neither dead nor gone."""
        return [seat for seat, (_, end) in self.lives.items() if end is None]

    def gone(self, seat: int) -> None:
        """`seat` has ended by itself."""
        if not self.is_over:
            self.lives[seat] = self.lives[seat][0], self.timeline.now
            self._break(seat)

    # Events

    def _at(self, seconds: float, act: Callable[[], None]) -> None:
        self.timeline.at(seconds, ARRIVED, -1, act)

    def _once_there(self, seat: int, act: Callable[[int], None]) -> None:
        """Where the lighthouse is away a worker gets its seat late, and what happens to it happens after that."""
        if seat in self.lives:
            act(seat)
        elif not self.is_over:
            self._at(self.timeline.now + _BACK, partial(self._once_there, seat, act))

    def _join(self, seat: int) -> None:
        if self.is_over:
            return
        if self.membership is None or seat > len(self.lives):  # seats are given in the order of those who come
            self._at(self.timeline.now + _BACK, partial(self._join, seat))
            return
        self.lives[seat] = self.timeline.now, None
        self.carry_out(self.membership.join(self.timeline.now, "virtual"))
        for other in self.lives:
            if self.lives[other][1] is not None or other in self._cut:
                self.companies[seat].connection(other, broken=True)
        self.companies[seat].poke()

    def _kill(self, seat: int) -> None:
        if self.is_over or self.lives[seat][1] is not None:
            return
        self.counts["deaths"] += 1
        self.lives[seat] = self.lives[seat][0], self.timeline.now
        self.companies[seat].is_dead = True
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
        if self.membership is not None:
            self.carry_out(self.membership.gone(self.timeline.now, seat))
        self._look()

    def _leave(self, seat: int) -> None:
        if not self.is_over and self.lives[seat][1] is None:
            self.counts["leaves"] += 1
            self.companies[seat].leaving.set()

    def _pause(self, seat: int) -> None:
        if not self.is_over and self.lives[seat][1] is None:
            self.counts["pauses"] += 1
            back = self.scheduler.workers[seat].back(self.timeline.now)
            if back > self.timeline.now + self.lease:
                self._at(self.timeline.now + self.lease, partial(self._cut_off, seat))

    def _cut_off(self, seat: int) -> None:
        if not self.is_over and self.lives[seat][1] is None:
            self._break(seat)

    def _resume(self, seat: int) -> None:
        if self.is_over or self.lives[seat][1] is not None or seat not in self._cut:
            return
        self._cut.discard(seat)
        self.wire.mend(seat)
        for other in self.alive():
            if other not in self._cut:
                self.companies[other].connection(seat, broken=False)
        if self.membership is not None:
            self.carry_out(self.membership.back(self.timeline.now, seat))
        self.companies[seat].poke()

    def _outage(self, seconds: float) -> None:
        if self.is_over or self.membership is None:
            return
        self.counts["outages"] += 1
        self.membership = None
        self._at(self.timeline.now + seconds, self._restart)

    def _restart(self) -> None:
        now = self.timeline.now
        self.membership = Membership(self.rules, self.journal, until=now + GRACE)
        self.journal.append({"event": "lit", "at": round(now, 3)})
        for seat in self.alive():
            if seat not in self._cut:
                self._at(now + _BACK, partial(self._return, seat))
        self._at(now + GRACE, self._tick)

    def _return(self, seat: int) -> None:
        if self.membership is not None and self.lives[seat][1] is None and seat not in self._cut:
            self.carry_out(self.membership.back(self.timeline.now, seat))
            self.companies[seat].poke()

    def _tick(self) -> None:
        if self.membership is not None:
            self.carry_out(self.membership.tick(self.timeline.now))

    # Words

    def _asked(self, seat: int, message: Any, answered: Callable[[Any], None]) -> None:
        if self.membership is None or seat in self._cut or seat not in self.lives:
            self._to(seat, partial(answered, None), _BACK)
            return
        newest = self.membership.newest_round
        if isinstance(message, Finished):
            self.finished.add(seat)
            self._to(seat, partial(answered, True))
            self._look()
            return
        orders = call(self.membership, self.timeline.now, seat, message)
        assert orders is not None, f"no worker says {message}"
        replies = self.carry_out(orders)
        self._to(seat, partial(answered, replies[-1] if replies else True))
        if self.membership.newest_round > newest:
            for seat in self.alive():
                if self.companies[seat].is_waiting:
                    self.companies[seat].poke()

    def carry_out(self, orders: Iterable[Order]) -> list[Any]:
        """Journal and send; the replies are given back."""
        replies: list[Any] = []
        self._mind_graces()
        for order in orders:
            if isinstance(order, Record):
                self.journal.append({**order.entry, "at": round(self.timeline.now, 3)})
            elif isinstance(order, Reply):
                replies.append(order.message)
            elif isinstance(order, Tell):
                self._to(order.seat, partial(self.companies[order.seat].told, order.message))
        return replies

    def _mind_graces(self) -> None:
        """Tick when the next one ends."""
        now = self.timeline.now
        end = None if self.membership is None else self.membership.ballots.graces.next
        if end is not None and end > now and end != self._ticks_at:
            self._ticks_at = end
            self._at(end, self._tick)

    def _to(self, seat: int, act: Callable[[], None], seconds: float = _WAY) -> None:
        """Have a worker hear something; a paused one hears it when it is back, a dead one never."""
        worker = self.scheduler.workers[seat]

        def arrive() -> None:
            if seat not in self.lives or self.lives[seat][1] is None:
                act()

        self.timeline.at(worker.back(self.timeline.now + seconds), ARRIVED, seat, arrive)

    def _look(self) -> None:
        """The run is over once all that are in it have done their last round."""
        if self.is_over or self.membership is None:
            return
        members = self.membership.members()
        if members and set(members) <= self.finished:
            self.end()

    def end(self) -> None:
        """The run is over for all."""
        self.is_over = True
        for seat in self.alive():
            self._to(seat, partial(self.companies[seat].told, Over()))
