"""When a round of an all-reduce method lands, and what its members do until then.

    member          exchange (attempt a) -> done(a) -> "land a": apply the answer
                                                    -> "retry a + 1 among these": from the saved payload
    lighthouse      all living members of the newest attempt are done -> journal, then send "land"
                    one of them is lost, and not all others are done  -> journal, then send "retry" among the living
                    the exchange failed at one of them (`NOTHING`)    -> journal, then send "retry" among the same

No member lands by its own judgement: it cannot know which members got the last message of one that then died. A
restarted lighthouse has its journal, but not the answers; members repeat them. `tests/membership/test_ballot.py` walks
every interleaving.

With a quorum there is no exchange as attempt 0, because its members are not known yet:

    member          delivers, and trains on   -> "retry 1 among these" -> as above
                                              -> "land", not among them: late; it fetches the mean
    lighthouse      all living members have delivered, or a quorum has and its grace is over -> journal, then send
                    "retry 1" among those that have

Everything except `Graces` is immutable: a call returns the next state.

The grace is the time for late members after which a mean is taken without them. It must never delay the next exchange.
A member that has delivered is at its next exchange one round later, and the exchange of this round must be over by
then. So the grace ends at the latest a round after the first delivery, less the duration of the last exchange and a
margin. It also ends a quarter of a round after a quorum is reached, because a late mean is applied late. It does not
start at the first delivery: a member far ahead of the others, as a joiner may be, would make them all late.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from isles.base.parsing import Exact, Float, Int, Ints

NOTHING = -1
"""The digest of a member whose exchange failed: the round is to be tried again."""
_TRIES = 3  # attempts among the same members with differing answers: after them somebody computes or reports wrongly
_WORDS = 2  # most reports of a member on one attempt: an answer, and a failure


@dataclass(frozen=True)
class Done(Exact):
    """A worker has the complete answer of an attempt of an all-reduce round; `digest` is its hash."""

    round: Int
    attempt: Int
    digest: Int


@dataclass(frozen=True)
class Delivered(Exact):
    """A worker has its share of a round with a quorum: the work of `steps` inner steps. seconds: until its next
    exchange; 0 if unknown.
    """

    round: Int
    steps: Int
    seconds: Float


@dataclass(frozen=True)
class RoundDecision(Exact):
    """The lighthouse's decision on a round.

    outcome: "land": apply the answer of `attempt`, the work of `members`; "retry": exchange as `attempt` among them.
    view: the newest one at the decision; a member that is left out takes part again from a newer view on. steps: with a
    quorum, the inner steps in the work of each of `members`.
    """

    round: Int
    outcome: Literal["land", "retry"]
    attempt: Int
    members: Ints
    view: Int = -1
    steps: Ints = ()


@dataclass(frozen=True)
class Ballot:
    """One round at the lighthouse.

    attempts: the members of each, the newest last. landed: the attempt to land, once decided; view: the newest one
    then. done: (attempt, member, digest) of answers since the lighthouse's start. out: members that the next attempt
    leaves out although they live: late, or refused. quorum: share of the living members that is enough; 0: all exchange
    at once. delivered: (member, inner steps) of delivered shares. is_closing: the grace is over. taken: (member, inner
    steps) of the first attempt after a quorum.
    """

    round: int
    attempts: tuple[tuple[int, ...], ...]
    landed: int | None = None
    view: int = -1
    done: frozenset[tuple[int, int, int]] = frozenset()
    out: frozenset[int] = frozenset()
    quorum: float = 0.0
    delivered: frozenset[tuple[int, int]] = frozenset()
    is_closing: bool = False
    taken: tuple[tuple[int, int], ...] = ()

    def add_share(self, member: int, steps: int) -> Ballot:
        """`member` has delivered the work of so many inner steps; ignored once an attempt was decided."""
        known = any(member == other for other, _ in self.delivered)
        return self if known or len(self.attempts) > 1 else replace(self, delivered=self.delivered | {(member, steps)})

    def add_answer(self, attempt: int, member: int, digest: int) -> Ballot:
        """`member` has an answer of `attempt` with hash `digest`; `NOTHING`: its attempt failed."""
        answers = [one for one in self.done if one[:2] == (attempt, member)]
        if attempt >= len(self.attempts) or len(answers) >= _WORDS:
            return self
        return replace(self, done=self.done | {(attempt, member, digest)})

    def without(self, member: int) -> Ballot:
        """The next attempt leaves out `member`."""
        return replace(self, out=self.out | {member})

    def decision(self, member: int | None = None) -> RoundDecision | None:
        """The present decision: to land, or the newest attempt after the first. None for a `member` without a part."""
        attempt = len(self.attempts) - 1 if self.landed is None else self.landed
        if self.landed is None and attempt == 0:
            return None
        members = self.attempts[attempt]
        if member is not None and member not in members and self.landed is None:
            return None
        return self._decision_of("retry" if self.landed is None else "land", attempt, members, self.view)

    def decide(
        self,
        living: Collection[int],
        worst: Callable[[Sequence[int]], int] | None = None,
        votes: Callable[[Collection[int]], int] = len,
    ) -> RoundDecision | None:
        """The decision that is due now, to be journalled and then passed to `decided`. None: wait. worst: picks the
        member to leave out if most members never get an answer; None: nobody is accused. votes: counts those of some.
        """
        if self.landed is not None:
            return None
        attempt = len(self.attempts) - 1
        members = self.attempts[attempt]
        left = tuple(member for member in members if member in living and member not in self.out)
        if not left:
            # All of this attempt are lost. Those of the first one that are back still wait in this round.
            first = self.attempts[1 if self.quorum and attempt else 0]
            left = tuple(member for member in first if member in living)
            return self._decision_of("retry", attempt + 1, left) if left and attempt else None
        if self.quorum and attempt == 0:
            return self._gathered(left)
        answers = {member: digest for a, member, digest in self.done if a == attempt}
        if all(member in answers for member in left):
            known = [answers[member] for member in left if answers[member] != NOTHING]
            by_answer = [[member for member in left if answers[member] == answer] for answer in dict.fromkeys(known)]
            alike = max(by_answer, key=votes, default=[])
            if len(alike) == len(left):
                return self._decision_of("land", attempt, members)
            if self.attempts[-_TRIES:] == (left,) * _TRIES:
                if alike and (2 * votes(alike) > votes(left) or worst is None):
                    left = tuple(alike)  # some compute wrongly: go on with the most common answer
                elif worst is not None and len(left) > 1:
                    # Most never get an answer: a member sends false shares or reports.
                    without = worst(left[::-1])
                    left = tuple(member for member in left if member != without)
            return self._decision_of("retry", attempt + 1, left)  # differing answers cannot be landed
        return self._decision_of("retry", attempt + 1, left) if left != members else None

    def has_quorum(self, living: Collection[int]) -> bool:
        """Whether enough living members have delivered, and no exchange was decided yet."""
        if not self.quorum or len(self.attempts) > 1 or self.landed is not None:
            return False
        steps = dict(self.delivered)
        left = [member for member in self.attempts[0] if member in living and member not in self.out]
        return sum(member in steps for member in left) >= self._quorum_of(len(left))

    def _quorum_of(self, members: int) -> int:
        return max(math.ceil(self.quorum * members), 1)

    def _gathered(self, here: tuple[int, ...]) -> RoundDecision | None:
        """The first exchange, among those of `here` that have delivered, once they are enough."""
        steps = dict(self.delivered)
        there = tuple(member for member in here if member in steps)
        enough = self.is_closing and len(there) >= self._quorum_of(len(here))
        if there != here and not enough:
            return None
        return RoundDecision(self.round, "retry", 1, there, steps=tuple(steps[member] for member in there))

    def _decision_of(
        self, outcome: Literal["land", "retry"], attempt: int, members: tuple[int, ...], view: int = -1
    ) -> RoundDecision:
        steps = dict(self.taken)
        return RoundDecision(
            self.round, outcome, attempt, members, view, tuple(steps[member] for member in members if member in steps)
        )

    def decided(self, decision: RoundDecision) -> Ballot:
        """The ballot after a journalled decision."""
        if decision.outcome == "land":
            return replace(self, landed=decision.attempt, view=decision.view)
        taken = self.taken or tuple(zip(decision.members, decision.steps, strict=False))
        return replace(
            self, attempts=(*self.attempts, decision.members), out=frozenset(), view=decision.view, taken=taken
        )


@dataclass(frozen=True)
class RoundState:
    """One round at a member.

    phase: "exchanging" the attempt; "done": it has an answer and waits for the decision; "landed"; "left out": the
    others landed without it, so its state differs from theirs.
    """

    member: int
    round: int
    attempt: int
    members: tuple[int, ...]
    phase: Literal["exchanging", "done", "landed", "left out"] = "exchanging"

    def answered(self, attempt: int) -> RoundState:
        """The exchange of `attempt` completed here. An earlier attempt changes nothing."""
        if self.phase != "exchanging" or attempt != self.attempt:
            return self
        return replace(self, phase="done")

    def apply(self, decision: RoundDecision) -> RoundState:
        """The state after a decision on this round; an old or repeated one changes nothing."""
        if decision.round != self.round or self.phase in ("landed", "left out"):
            return self
        if self.member not in decision.members:
            return replace(self, phase="left out") if decision.outcome == "land" else self
        if decision.outcome == "retry":
            if decision.attempt <= self.attempt:
                return self
            return replace(self, attempt=decision.attempt, members=decision.members, phase="exchanging")
        if decision.attempt == self.attempt and self.phase == "done":
            return replace(self, phase="landed")
        return self  # land once this member has that answer


_SHARE, _SPARE = 0.25, 1.25  # of a round after a quorum is reached; of the duration of an exchange
_LEAST = 0.02  # of a round: messages take time, too


class Graces:
    """When the grace of each round ends. Seconds of the caller's clock."""

    def __init__(self) -> None:
        self._ends: dict[int, float] = {}
        self._shares: dict[int, float] = {}  # seconds of grace after a quorum, until it is reached
        self._began: dict[int, float] = {}
        self._exchange = 0.0  # duration of the last exchange, seconds

    def delivered(self, now: float, round: int, seconds: float) -> None:
        """A member has delivered; seconds: of its next round, 0 if unknown."""
        if seconds <= 0:
            return
        end = now + max(seconds - _SPARE * self._exchange, _LEAST * seconds)
        if round not in self._ends:
            self._shares[round] = _SHARE * seconds
        self._ends[round] = min(self._ends.get(round, end), end)

    def enough(self, now: float, round: int) -> None:
        """A quorum is reached. Repetitions change nothing."""
        share = self._shares.pop(round, None)
        if share is not None:
            self._ends[round] = min(self._ends[round], now + share)

    def exchanging(self, now: float, round: int) -> None:
        """The exchange of `round` begins, or is retried; the duration of its last attempt will count."""
        self._ends.pop(round, None)
        self._shares.pop(round, None)
        self._began[round] = now

    def landed(self, now: float, round: int) -> None:
        """The exchange of `round` is over; note its duration."""
        self._exchange = now - self._began.pop(round, now)
        self._began = {other: at for other, at in self._began.items() if other > round}
        self._ends = {other: at for other, at in self._ends.items() if other > round}
        self._shares = {other: share for other, share in self._shares.items() if other > round}

    def over(self, now: float) -> set[int]:
        """Rounds whose grace is over."""
        return {round for round, end in self._ends.items() if end <= now}

    @property
    def next(self) -> float | None:
        """When the next grace ends; None: none is open."""
        return min(self._ends.values(), default=None)
