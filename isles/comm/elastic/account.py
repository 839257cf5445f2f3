"""The account of a run's data: which cells were read for good, and which are owed to the next view.

A cell is read for good once its reader is in a world that goes on: as long as the reader lives, or, after it, where a
survivor took part in an exchange with it at the end of that round or a later one. Everything else is owed:

    rounds that a worker did without knowing the view, for it read out of turn          (`Beginning.skipped`)
    rounds of a worker that was taken out, which no survivor had seen                   (dead, cut off, left behind)
    debts that a view ended too early to read

A worker's word counts up to the newest round that it told of itself: the round it is in. So if the ledger is behind, a
cell is read twice, never not at all. It is at most one cell a death, for a worker reads its own cells one round ahead
of the lighthouse's answers and no further (`member.LEASE`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from isles.comm.elastic.cells import fresh_before, left_over, lots, merged
from isles.comm.view import Lot, View

_WITNESSES = 8  # of each seat: all of them would have to be lost with it before anything more is owed than need be
_LANDINGS = 8


@dataclass(frozen=True)
class Tenure:
    """The rounds `first` .. `until` - 1 in which a seat held `place` of a view. until None: as long as the view."""

    view: int
    place: int
    first: int
    until: int | None = None


@dataclass
class _Seat:
    """What is known of one seat. begun: the newest round that it told of."""

    begun: int = 0
    tenures: list[Tenure] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)  # rounds read out of turn that are not in any debt yet
    witnesses: dict[int, int] = field(default_factory=dict)  # by seat: the newest round of this one that it has seen


class Account:
    """Told of every view, round and exchange; says where the next view begins and what it owes."""

    def __init__(self) -> None:
        self.views: dict[int, View] = {}  # those that a tenure or a debt still names, and the newest
        self._seats: dict[int, _Seat] = {}
        self._landings: list[tuple[int, frozenset[int]]] = []
        self._forgone: set[int] = set()  # seats that nobody waits for any more, whose cells are not settled yet

    @property
    def newest(self) -> View | None:
        """The last view that was opened."""
        return self.views[max(self.views)] if self.views else None

    def begun(self, seat: int, round: int, skipped: Iterable[int], seen: Mapping[int, int]) -> None:
        """`seat` is in `round`; of its rounds it did `skipped` out of turn; it has taken part in exchanges with others,
        `seen` = the newest of their rounds, by seat.
        """
        entry = self._seats.setdefault(seat, _Seat())
        entry.begun = max(entry.begun, round)
        entry.skipped.update(skipped)
        for other, newest in seen.items():
            if other not in self._seats:  # it was settled long ago
                continue
            witnesses = self._seats[other].witnesses
            newest = max(newest, witnesses.pop(seat, 0))
            witnesses[seat] = newest  # behind the others: the order of the dictionary is that of the news
            if len(witnesses) > _WITNESSES:
                del witnesses[next(iter(witnesses))]

    def landed(self, round: int, seats: Collection[int]) -> None:
        """The answer of `round` holds the work of `seats`, and all of them have it."""
        self._landings = [*self._landings, (round, frozenset(seats))][-_LANDINGS:]

    def forgo(self, seat: int) -> None:
        """What `seat` has not shared by now is not waited for: it is dead, or begins again with another's state."""
        self._forgone.add(seat)

    def reclaim(self, seat: int) -> None:
        """`seat` is back with everything it had, before any view went on without it."""
        self._forgone.discard(seat)

    def next(self, since: int, living: Collection[int]) -> tuple[int, tuple[Lot, ...]]:
        """(`View.start`, `View.owed`) of a view that takes over at round `since`; changes nothing.

        living: seats whose weights go on; not those that are forgone.
        """
        view = self.newest
        if view is None:
            return 0, ()
        owed, _ = self._settled(since, living)
        return view.start + fresh_before(view, since), tuple(owed)

    def open(self, view: View, living: Collection[int]) -> None:
        """`view` takes over at its round, with the `start` and the debts that `next` gave for the same `living`."""
        if self.newest is not None:
            _, self._seats = self._settled(view.since, living)
            self._forgone = set()
        for place, seat in enumerate(view.seats):
            entry = self._seats.setdefault(seat, _Seat())
            entry.tenures.append(Tenure(view.number, place, view.since))
        self.views[view.number] = view
        named = {tenure.view for entry in self._seats.values() for tenure in entry.tenures}
        named |= {lot.view for lot in view.owed} | {view.number}
        named |= {lot.view for number in named & self.views.keys() for lot in self.views[number].owed}
        self.views = {number: view for number, view in self.views.items() if number in named}

    def outstanding(self, until: int, living: Collection[int]) -> list[Lot]:
        """What would be owed if the run ended before round `until`."""
        return self._settled(until, living)[0] if self.newest is not None else []

    def held(self, seat: int, living: Collection[int]) -> int:
        """The newest round of `seat` whose work is in another one of `living`; 0 where there is none."""
        entry = self._seats.get(seat, _Seat())
        rounds = [round for witness, round in entry.witnesses.items() if witness in living and witness != seat]
        rounds += [r for r, seats in self._landings if seat in seats and any(s in living and s != seat for s in seats)]
        return min(max(rounds, default=0), entry.begun)

    def _settled(self, until: int, living: Collection[int]) -> tuple[list[Lot], dict[int, _Seat]]:
        """(what is owed if the newest view ends before round `until`, the seats as they are then)."""
        view = self.newest
        assert view is not None
        owed = left_over(view, until)
        after: dict[int, _Seat] = {}
        for seat in sorted(self._seats):
            entry = self._seats[seat]
            tenures = [replace(t, until=until) if t.until is None else t for t in entry.tenures]
            if seat in self._forgone:
                owed += self._unseen(entry, tenures, self.held(seat, living))
                continue
            missed, kept = self._skipped(entry, tenures)
            owed += missed
            kept = [tenure for tenure in kept if (tenure.until or until) > self._safe(entry)]
            skipped = {round for round in entry.skipped if round >= until}
            after[seat] = _Seat(entry.begun, kept, skipped, dict(entry.witnesses))
        return merged(owed), after

    def _safe(self, entry: _Seat) -> int:
        """The first round whose cells could still be owed if the seat were lost with as many others as are minded."""
        seen = min(entry.witnesses.values()) if len(entry.witnesses) == _WITNESSES else 0
        landed = self._landings[0][0] if len(self._landings) == _LANDINGS else 0
        return min(max(seen, landed), entry.begun) + 1

    def _unseen(self, entry: _Seat, tenures: list[Tenure], held: int) -> list[Lot]:
        """All cells of a lost worker but those that it has read in a round up to `held`."""
        owed: list[Lot] = []
        for tenure in tenures:
            until = tenure.until or tenure.first
            for round in sorted(r for r in entry.skipped if tenure.first <= r < min(until, held + 1)):
                owed += lots(self.views[tenure.view], tenure.place, round, round + 1)
            owed += lots(self.views[tenure.view], tenure.place, max(tenure.first, held + 1), until)
        return owed

    def _skipped(self, entry: _Seat, tenures: list[Tenure]) -> tuple[list[Lot], list[Tenure]]:
        """(the cells that a worker that goes on has not read, its tenures without them)."""
        owed: list[Lot] = []
        kept: list[Tenure] = []
        for tenure in tenures:
            first, until = tenure.first, tenure.until or tenure.first
            for round in sorted(r for r in entry.skipped if tenure.first <= r < until):
                owed += lots(self.views[tenure.view], tenure.place, round, round + 1)
                if first < round:
                    kept.append(replace(tenure, first=first, until=round))
                first = round + 1
            if first < until:
                kept.append(replace(tenure, first=first, until=until))
        return owed, kept
