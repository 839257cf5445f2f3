"""The rounds of an all-reduce method that are open at the lighthouse, and those that have landed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from isles.comm.elastic.ballot import Ballot, Word
from isles.comm.elastic.guards.strikes import Strikes
from isles.comm.elastic.messages import Accusation, Delivered, Done
from isles.comm.elastic.quorum.grace import Graces
from isles.comm.view import View

_KEPT = 64  # rounds for which a member that slept still hears what became of them


class Ballots:
    """The ballots of all rounds.

    What `apply` was given survives a restart of the lighthouse. Answers and accusations do not: members tell them
    again.
    """

    def __init__(self) -> None:
        self._open: dict[int, Ballot] = {}
        self._landed: dict[int, Ballot] = {}
        self._accused: dict[tuple[int, int, int], dict[int, Accusation]] = {}  # by round, attempt and accused: by sayer
        self._out: dict[int, int] = {}  # by seat: the newest view when others landed without it
        self._view = -1
        self.graces, self.strikes = Graces(), Strikes()

    @property
    def are_open(self) -> bool:
        """Whether there is a round on which something was said, and which has not landed."""
        return bool(self._open)

    def done(self, seat: int, done: Done, members: tuple[int, ...]) -> None:
        """A member has an answer. members: of the first attempt of its round."""
        ballot = self._of(done.round, members)
        if ballot is not None:
            self._open[done.round] = ballot.told(done.attempt, seat, done.digest)

    def delivered(self, now: float, seat: int, delivered: Delivered, members: tuple[int, ...], quorum: float) -> None:
        """A member has a share of a round for which `quorum` is enough."""
        ballot = self._of(delivered.round, members)
        if ballot is not None:
            self._open[delivered.round] = replace(ballot, quorum=quorum).has(seat, delivered.steps)
            self.graces.delivered(now, delivered.round, delivered.seconds)

    def accused(self, seat: int, accusation: Accusation, members: tuple[int, ...], living: Collection[int]) -> None:
        """`seat` accuses another member. The next attempt leaves out who was refused by more than half of the others;
        or was late for so many, though in the first attempt, whose deadline is short, nobody is late who is done. But
        who has had others refuse more members than one, in this round or before, is left out in their place.
        """
        ballot = self._of(accusation.round, members)
        accused = accusation.seat
        if ballot is None or accusation.attempt != len(ballot.attempts) - 1 or accused not in ballot.attempts[-1]:
            return
        said = self._accused.setdefault((accusation.round, accusation.attempt, accused), {})
        said[seat] = accusation
        others = [s for s in ballot.attempts[-1] if s in living and s != accused and s not in ballot.out]
        sayers = [s for s in others if s in said]
        counted = [said[s] for s in sayers]
        if not accusation.attempt and any((0, accused) == told[:2] for told in ballot.done):
            counted = [one for one in counted if one.charge == "refused"]
        if 2 * len(counted) > len(others) and seat in others:
            judges = [one.by for one in counted if one.by in others]
            ballot = ballot.without(self.strikes.worst((accused, *judges, *sayers)))
        self._open[accusation.round] = ballot

    def _worst(self, round: int) -> Callable[[Sequence[int]], int] | None:
        """Who has most accusations of `round`, or refusals of any, of some seats; None where nobody has accused."""
        said = {key[2]: who for key, who in self._accused.items() if key[0] == round}
        pairs = {frozenset((accused, seat)) for accused, who in said.items() for seat in who}
        return partial(self.strikes.worst, more=pairs) if pairs else None

    def due(self, now: float, living: Mapping[int, float]) -> Iterator[Word]:
        """Words that are decided now. Each must be recorded, which gives it to `apply`, before the next is taken.

        living: by seat, the first round that waits for it.
        """
        here = {round: {seat for seat, entered in living.items() if entered <= round} for round in self._open}
        for round, ballot in self._open.items():
            if ballot.has_quorum(here[round]):
                self.graces.enough(now, round)
        for round in self.graces.over(now) & self._open.keys():
            self._open[round] = replace(self._open[round], is_closing=True)
        for round in sorted(self._open):
            word = self._open[round].decide(here[round], self._worst(round))
            if word is not None:
                (self.graces.landed if word.verdict == "land" else self.graces.exchanging)(now, round)
                yield replace(word, view=self._view)

    def apply(self, word: Word, members: tuple[int, ...]) -> list[int]:
        """A recorded word; members: of the first attempt. Those of its round without whom the others land."""
        ballot = self._open.get(word.round) or Ballot(word.round, (members,))
        ballot = ballot.decided(word)
        if word.verdict == "again":
            self._open[word.round] = ballot
            return []
        self._open.pop(word.round, None)
        self._landed = {**{r: b for r, b in self._landed.items() if r > word.round - _KEPT}, word.round: ballot}
        self._accused = {key: who for key, who in self._accused.items() if key[0] != word.round}
        tried = ballot.attempts[1:] if ballot.taken else ballot.attempts  # who was only late fetches the mean
        left = sorted({seat for seats in tried for seat in seats} - set(word.seats))
        self._out |= dict.fromkeys(left, word.view)
        return left

    def has_landed(self, round: int) -> bool:
        """Whether that was decided, and is still known."""
        return round in self._landed

    def word(self, round: int, seat: int | None = None) -> Word | None:
        """What `seat` is to know of `round`; None: whoever asks."""
        ballot = self._landed.get(round) or self._open.get(round)
        return None if ballot is None else ballot.word(seat)

    def opened(self, view: View) -> None:
        """A new view: who is in it from here on has the others' state."""
        self._view = view.number

    def left_out(self, view: View) -> Collection[int]:
        """Members of `view` that take no part in its rounds any more, for they missed a landing."""
        return {seat for seat, number in self._out.items() if number >= view.number}

    def _of(self, round: int, members: tuple[int, ...]) -> Ballot | None:
        """The open ballot of a round, a new one where it is the first word of it; None where it has landed."""
        if round in self._landed or (round not in self._open and not members):
            return None
        return self._open.get(round) or Ballot(round, (members,))
