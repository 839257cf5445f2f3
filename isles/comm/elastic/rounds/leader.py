"""What the leader of a member decides of its rounds: with whom each is exchanged, and what becomes of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from isles.comm.elastic.ballot import Part
from isles.comm.elastic.company import Company
from isles.comm.elastic.quorum.delivery import Deliveries
from isles.comm.elastic.record import ALONE, WHOLE
from isles.comm.elastic.rounds.decision import Decision
from isles.comm.errors import CommError, Malformed, PeerLost, Refused
from isles.comm.group import Group

KEPT = 8
"""Rounds whose answers are remembered."""
_SAMPLES, _ENOUGH = 20, 5  # exchanges whose time counts; of how many something can be said
_LEAST, _FIRST = 3.0, 10.0  # seconds that a partner is waited for: at the least; before anything can be said
_SPREADS = 5.0


class RoundLeader:
    """By what its line to the lighthouse says. alone: the group of this member by itself.

    A partner is waited for a little longer than exchanges usually take (median and spread of the last `_SAMPLES`), and
    at most `world.outer_deadline`: a partner that has not heard of the new view does its round alone, without a word.
    """

    def __init__(self, company: Company, alone: Group) -> None:
        self.company, self.alone, self.seat = company, alone, alone.ranks[0]
        self.deliveries = Deliveries(company, alone)
        self._begun: dict[int, float] = {}  # when the exchange of a round was decided
        self._took: deque[float] = deque(maxlen=_SAMPLES)
        self._part: Part | None = None  # the newest round that lands on the lighthouse's word
        self._view = -1  # its view
        self._opened = 0.0
        self._outcomes: dict[int, tuple[tuple[int, ...], str]] = {}

    def exchange(self, round: int) -> Decision:
        """Among whom `round` is exchanged."""
        standing = self.company.standing(round)
        self.note_begun(round)
        return Decision(
            kind="exchange",
            round=round,
            members=standing.seats,
            view=max(standing.view, 0),
            seconds=self._patience(),
        )

    def lost(self, seat: int) -> bool:
        """See `isles.comm.roster.Roster`."""
        return self.company.lost(seat) or self.company.is_silent(seat)

    def miss(self, seat: int, error: CommError) -> None:
        """Note a failed exchange. Who is gone the network tells, and who is late is met again; only a share that cannot
        be one is reported to the lighthouse.
        """
        newest = max(self._begun, default=0)
        if isinstance(error, (Malformed, Refused)):
            self.accuse(newest, error)
        self.note(newest, tuple(sorted({self.seat, seat} - {-1})), type(error).__name__)

    def accepts(
        self, round: int, seats: Sequence[int], digest: int | None = 0, failure: CommError | None = None
    ) -> bool:
        """Whether what was exchanged among `seats` may be used. digest: None where it is not whole at all places of
        this member, for `failure`.
        """
        if failure is not None:
            self.miss(getattr(failure, "peer", -1), failure)
        if digest is None:
            self.note(round, tuple(seats), PeerLost.__name__)  # unless it is known better
            return False
        if len(seats) > 1 and round in self._begun:
            self._took.append(self._now() - self._begun[round])
        accepted = self.is_answer_used(round, seats)
        if len(seats) > 1:
            self.note(round, tuple(seats), WHOLE if accepted else PeerLost.__name__)
        return accepted

    def is_answer_used(self, round: int, seats: Sequence[int]) -> bool:
        """See `Member.accept`."""
        return self.company.accepts(round, seats)

    def accuse(self, round: int, error: CommError) -> None:
        """Tell the lighthouse who sent what cannot be, where it is heard."""
        if self.company.has_answers:
            self.company.accuse(round, 0, error)

    def outcome(self, round: int) -> tuple[tuple[int, ...], str]:
        """(who took part in this member's exchange of `round`, `WHOLE` or `ALONE` or the error that ended it)."""
        return self._outcomes.get(round, ((self.seat,), ALONE))

    def note_begun(self, round: int) -> None:
        """The exchange of `round` is decided."""
        self._begun = {**{r: at for r, at in self._begun.items() if r > round - KEPT}, round: self._now()}

    def note(self, round: int, seats: tuple[int, ...], outcome: str) -> None:
        """Of the messages of a round the first that failed counts."""
        if self._outcomes.get(round, (seats, WHOLE))[1] == WHOLE:
            kept = {r: o for r, o in self._outcomes.items() if r > round - KEPT}
            self._outcomes = {**kept, round: (seats, outcome)}

    def start_round(self, round: int) -> Decision:
        """Among whom a round that all land together, or none, is exchanged now; to postpone it where that cannot be
        said.
        """
        postponed = Decision(kind="postpone", round=round)
        if self._part is None or self._part.round != round:
            standing = self.company.decided(round)
            if standing is None:
                return postponed
            self._part, self._view = Part(self.seat, round, 0, standing.seats), standing.view
        if self._lacks(self._part) and (word := self.company.finish_round(round, self._part.attempt, None)) is not None:
            self._part = self._part.heard(word)  # nobody waits for who cannot come
        part, self._opened = self._part, self._now()
        if part.phase != "exchanging":
            return postponed
        waits = self.alone.deadlines.outer if part.attempt else self._patience()  # others may still be at their steps
        return Decision(
            kind="exchange", round=round, attempt=part.attempt, members=part.seats, view=self._view, seconds=waits
        )

    def finish_round(self, round: int, attempt: int, digest: int | None, error: CommError | None) -> Decision:
        """What becomes of an attempt: to land it, to retry or to postpone the round."""
        part = self._part
        assert part is not None and part.round == round, "it was opened"
        if digest is not None:
            part = part.answered(attempt)
            if attempt == 0:
                self._took.append(self._now() - self._opened)
        elif error is not None:
            self.company.accuse(round, attempt, error)
        word = self.company.finish_round(round, attempt, digest)
        if word is not None:
            part = part.heard(word)
        self._part = part
        if word is not None and part.phase == "landed":
            self.company.landed(word)
            self.note(round, word.seats, WHOLE)
            return Decision(kind="land", round=round)
        return Decision(kind="retry" if word is not None and part.phase == "exchanging" else "postpone", round=round)

    def _lacks(self, part: Part) -> bool:
        return part.phase == "exchanging" and any(self.company.lost(seat) for seat in part.seats if seat != self.seat)

    def begin_anew(self) -> None:
        """This member has another state: what is known of its rounds before is not valid any more."""
        self._begun, self._outcomes, self._part = {}, {}, None

    def _now(self) -> float:
        return self.alone.transport.now()

    def _patience(self) -> float:
        """Seconds for which a partner is waited for."""
        longest = self.alone.deadlines.outer
        if len(self._took) < _ENOUGH:
            return min(_FIRST, longest)
        usual = median(self._took)
        spread = median(abs(one - usual) for one in self._took)
        return min(max(_LEAST, usual + _SPREADS * spread), longest)
