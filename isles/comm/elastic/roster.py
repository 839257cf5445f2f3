"""Who takes part in each exchange of a world that changes, by the views that this worker knows of."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from isles.comm.elastic.ballot import Part
from isles.comm.elastic.company import Company
from isles.comm.elastic.quorum.delivery import Deliveries
from isles.comm.elastic.record import ALONE, WHOLE
from isles.comm.elastic.ruling import accuse, decided, ruled
from isles.comm.errors import CommError, Malformed, Refused
from isles.comm.group import Group
from isles.comm.roster import Ruling
from isles.comm.transport import Deadlines

KEPT = 8
"""Rounds whose answers are remembered."""
_SAMPLES, _ENOUGH = 20, 5  # exchanges whose time counts; of how many something can be said
_LEAST, _FIRST = 3.0, 10.0  # seconds that a partner is waited for: at the least; before anything can be said
_SPREADS = 5.0


class ElasticRoster:
    """An `isles.comm.roster.Roster`. alone: the group of this worker by itself. A worker starts alone, because its
    weights are drawn as everybody's are, or taken from a member.

    A partner is waited for a little longer than exchanges usually take (median and spread of the last `_SAMPLES`), and
    at most `world.outer_deadline`: a partner that has not heard of the new view does its round alone, without a word.
    """

    grows = True
    answers_alike = False
    learns = True
    """Whether a partner is waited for no longer than usual; else as long as the founders' deadline says."""

    def __init__(self, company: Company, alone: Group) -> None:
        self.company, self.founders = company, alone
        self.deliveries = Deliveries(company, alone)
        self._answers: dict[int, tuple[Group, float]] = {}  # and when they were given
        self._took: deque[float] = deque(maxlen=_SAMPLES)
        self._part: Part | None = None  # the newest round that lands on the lighthouse's word
        self._view = -1  # its view
        self._opened = 0.0
        self._outcomes: dict[int, tuple[tuple[int, ...], str]] = {}

    def group(self, round: int) -> Group:
        if round not in self._answers:
            standing, now = self.company.standing(round), self.founders.transport.now()
            group = replace(
                self.founders, ranks=standing.seats, view=max(standing.view, 0), deadlines=self._deadlines()
            )
            self._answers = {**{r: a for r, a in self._answers.items() if r > round - KEPT}, round: (group, now)}
        return self._answers[round][0]

    def lost(self, seat: int) -> bool:
        return self.company.lost(seat) or self.company.is_silent(seat)

    def lacks(self, seats: Sequence[int]) -> bool:
        return any(self.lost(seat) for seat in seats)

    def miss(self, seat: int, error: CommError) -> None:
        """Note a failed exchange. Who is gone the network tells, and who is late is met again; only a share that cannot
        be one is reported to the lighthouse.
        """
        newest = max(self._answers, default=0)
        if isinstance(error, (Malformed, Refused)) and self.company.has_answers:
            accuse(self.company, newest, 0, error)
        self._note(newest, tuple(sorted({self.company.seat, seat} - {-1})), type(error).__name__)

    def accepts(self, round: int, seats: Sequence[int], *, whole: bool) -> bool:
        if not whole:
            return False
        if len(seats) > 1 and round in self._answers:
            self._took.append(self.founders.transport.now() - self._answers[round][1])
        accepted = self.company.accepts(round, seats)
        if len(seats) > 1:
            self._note(round, tuple(seats), WHOLE if accepted else "PeerLost")
        return accepted

    def outcome(self, round: int) -> tuple[tuple[int, ...], str]:
        """(who took part in this worker's exchange of `round`, `WHOLE` or `ALONE` or the error that ended it)."""
        return self._outcomes.get(round, ((self.company.seat,), ALONE))

    def _note(self, round: int, seats: tuple[int, ...], outcome: str) -> None:
        """Of the messages of a round the first that failed counts."""
        if self._outcomes.get(round, (seats, WHOLE))[1] == WHOLE:
            kept = {r: o for r, o in self._outcomes.items() if r > round - KEPT}
            self._outcomes = {**kept, round: (seats, outcome)}

    def opening(self, round: int) -> tuple[Group, int] | None:
        if self._part is None or self._part.round != round:
            standing = decided(self.company, round)
            if standing is None:
                return None
            self._part, self._view = Part(self.company.seat, round, 0, standing.seats), standing.view
        part, self._opened = self._part, self.founders.transport.now()
        if part.phase != "exchanging":
            return None
        waits = self.founders.deadlines if part.attempt else self._deadlines()  # others may still be at their steps
        return replace(self.founders, ranks=part.seats, view=self._view, deadlines=waits), part.attempt

    def commit(self, round: int, attempt: int, digest: int | None, error: CommError | None = None) -> Ruling:
        part = self._part
        assert part is not None and part.round == round, "it was opened"
        if digest is not None:
            part = part.answered(attempt)
            if attempt == 0:
                self._took.append(self.founders.transport.now() - self._opened)
        elif error is not None:
            accuse(self.company, round, attempt, error)
        word = ruled(self.company, round, attempt, digest)
        if word is not None:
            part = part.heard(word)
        self._part = part
        if word is None or part.phase == "left out":
            return "wait"
        if part.phase == "landed":
            self.company.landed(word)
            self._note(round, word.seats, WHOLE)
            return "land"
        return "again" if part.phase == "exchanging" else "wait"

    def begin_anew(self) -> None:
        """This worker has another state: answers about its rounds before are not valid any more."""
        self._answers, self._outcomes, self._part = {}, {}, None

    def survivors(self, asked: bool) -> Group:
        """Itself: the one model is put together at the lighthouse."""
        return self.founders

    def state_dict(self) -> dict[str, Any]:
        """Nothing: what is not known here the lighthouse knows."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    def _deadlines(self) -> Deadlines:
        waits = self.founders.deadlines
        if not self.learns:
            return waits
        if len(self._took) < _ENOUGH:
            return replace(waits, outer=min(_FIRST, waits.outer))
        usual = median(self._took)
        spread = median(abs(one - usual) for one in self._took)
        return replace(waits, outer=min(max(_LEAST, usual + _SPREADS * spread), waits.outer))
