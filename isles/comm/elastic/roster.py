"""The roster of a world that changes: views as this worker knows them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from isles.comm.elastic.ballot import Part
from isles.comm.elastic.company import Company
from isles.comm.errors import CommError, DeadlinePassed, Diverged, Malformed, Refused
from isles.comm.group import Group
from isles.comm.roster import Ruling
from isles.comm.transport import Deadlines

_KEPT = 8  # rounds whose answers are remembered
_SAMPLES, _ENOUGH = 20, 5  # exchanges whose time counts; of how many something can be said
_LEAST, _FIRST = 2.0, 10.0  # seconds that a partner is waited for: at the least; before anything can be said
_SPREADS = 5.0
_UNDECIDED = 3.0  # seconds for a view that is on its way


class ElasticRoster:
    """See `isles.comm.roster.Roster`. alone: the group of this worker by itself, which starts alone: its weights are
    drawn as everybody's are, or taken from a member.

    A partner is waited for as long as exchanges usually take, and some more, at most `world.outer_deadline`: one that
    does not know yet that it has this partner does its round alone, and says nothing.
    """

    grows = True

    def __init__(self, company: Company, alone: Group) -> None:
        self.company, self.founders = company, alone
        self._answers: dict[int, tuple[Group, float]] = {}  # and when they were given
        self._took: deque[float] = deque(maxlen=_SAMPLES)
        self._part: Part | None = None  # the newest round that lands on the lighthouse's word
        self._view = -1  # its view
        self._opened = 0.0

    def group(self, round: int) -> Group:
        if round not in self._answers:
            standing, now = self.company.standing(round), self.founders.transport.now()
            group = replace(
                self.founders, ranks=standing.seats, view=max(standing.view, 0), deadlines=self._deadlines()
            )
            self._answers = {**{r: a for r, a in self._answers.items() if r > round - _KEPT}, round: (group, now)}
        return self._answers[round][0]

    def lost(self, seat: int) -> bool:
        return self.company.lost(seat)

    def miss(self, seat: int, error: CommError) -> None:
        """Who is gone the network tells; who is only late is met again."""

    def accepts(self, round: int, seats: Sequence[int]) -> bool:
        if len(seats) > 1 and round in self._answers:
            self._took.append(self.founders.transport.now() - self._answers[round][1])
        return self.company.accepts(round, seats)

    def opening(self, round: int) -> tuple[Group, int] | None:
        if self._part is None or self._part.round != round:
            standing = self.company.decided(round, _UNDECIDED)
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
            self._accuse(round, attempt, error)
        word = self.company.word(round, attempt, digest)
        if word is not None:
            part = part.heard(word)
        self._part = part
        if word is None or part.phase == "left out":
            return "wait"
        if part.phase == "landed":
            self.company.landed(word)
            return "land"
        return "again" if part.phase == "exchanging" else "wait"

    def _accuse(self, round: int, attempt: int, error: CommError) -> None:
        """Tell the lighthouse of whom the failure speaks; who is gone it sees itself."""
        if isinstance(error, DeadlinePassed) and error.peer >= 0:
            self.company.accuse(round, attempt, error.peer, "late", "")
        elif isinstance(error, (Refused, Malformed, Diverged)) and error.peer >= 0:
            self.company.accuse(round, attempt, error.peer, "refused", str(error))

    def begin_anew(self) -> None:
        """This worker has another state: answers about its rounds before are not valid any more."""
        self._answers, self._part = {}, None

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
        if len(self._took) < _ENOUGH:
            return replace(waits, outer=min(_FIRST, waits.outer))
        usual = median(self._took)
        spread = median(abs(one - usual) for one in self._took)
        return replace(waits, outer=min(max(_LEAST, usual + _SPREADS * spread), waits.outer))
