"""A worker's share of a round for whose mean a quorum is enough, while the worker trains on.

reported    the lighthouse knows of it; decisions on it are looked at between inner steps
exchanging  among those who have delivered: an attempt is to be made
done        its answer is here, or it failed, and that is reported
landed      it is everybody's: land it
late        the mean is taken without it, and is to be fetched
over        this worker has no part in the run now
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from isles.comm.errors import CommError
from isles.comm.group import Group
from isles.membership.messages import Delivered, Done
from isles.membership.round_commit import NOTHING, RoundDecision, RoundState

if TYPE_CHECKING:
    from isles.membership.client import MembershipClient

MEAN_HOLDERS = 2  # of those who landed a mean so many, the first, keep it for who was late
_SOON = 0.3  # seconds until something is told again
Phase = Literal["told", "exchanging", "done", "landed", "late", "over"]


@dataclass(frozen=True, slots=True)
class MissedMean:
    """What others landed in a round without this worker: the mean (n,), of so many, `whole` where it was not skipped;
    the hash of the anchor after it. left_out: who takes no part any more since then, as `MemberState.left_out`.
    """

    mean: Tensor
    participants: int
    whole: bool
    digest: int
    left_out: Mapping[int, int]


class Delivery:
    """Of `round`, the work of so many inner `steps`; this worker's next exchange is in `seconds`, 0 where that is
    unknown. word: the newest on it. It is told first by asking, so that who is late knows at once.
    """

    def __init__(self, line: MembershipClient, round: int, steps: int, seconds: float, now: float) -> None:
        self.round, self.steps = round, steps
        self.decision: RoundDecision | None = None
        self._line, self._told = line, now
        self._part = RoundState(line.member, round, 0, (line.member,))
        self._said: Delivered | Done = Delivered(round, steps, seconds)
        self._failed = -1  # the newest attempt that did
        answer = line.ask(self._said)
        if isinstance(answer, RoundDecision):
            line.decisions.hear(answer)

    @property
    def attempt(self) -> int:
        """The number of the exchange that is being made, or waits for its word."""
        return self._part.attempt

    @property
    def factor(self) -> float:
        """What this worker's share is scaled by, so that the mean of all is one by inner steps."""
        assert self.decision is not None and self.decision.steps
        return len(self.decision.steps) * self.steps / sum(self.decision.steps)

    def look(self, now: float) -> Phase:
        """The phase that it is in now. What was told is told again now and then, for words may be lost."""
        self.decision = self._line.decisions.of(self.round) or self.decision
        if self.decision is not None:
            self._part = self._part.heard(self.decision)
        if self._line.is_over:
            return "over"
        if self._part.phase == "landed":
            return "landed"
        is_without = self.decision is not None and self._line.member not in self.decision.members
        if is_without and (self._part.phase == "left out" or self._part.attempt == 0):
            return "late"
        waits = self._part.attempt == 0 or self._part.phase == "done" or self._part.attempt == self._failed
        if waits and now - self._told >= _SOON:
            self._told = now
            self._line.say(self._said)
        return "exchanging" if not waits else "told" if self._part.attempt == 0 else "done"

    def answered(self, digest: int | None, now: float) -> None:
        """The exchange of this attempt has an answer with that hash, or failed."""
        if digest is None:
            self._failed = self._part.attempt
        else:
            self._part = self._part.answered(self._part.attempt)
        self._said, self._told = Done(self.round, self._part.attempt, NOTHING if digest is None else digest), now
        self._line.say(self._said)

    def say(self) -> None:
        """Tell it again."""
        self._line.say(self._said)

    def wait(self) -> None:
        """Wait until there is something new to look at, a moment at most."""
        known = self.decision
        self._line.wait(lambda: self._line.is_over or self._line.decisions.of(self.round) != known, _SOON)


class Deliveries:
    """How a worker makes them. alone: its group of itself. fetch: a mean that it missed, None where nobody gives it;
    landed: called after each landing with its round.
    """

    def __init__(self, line: MembershipClient, alone: Group) -> None:
        self.line, self._alone = line, alone
        self.fetch: Callable[[RoundDecision], MissedMean | None] = lambda decision: None
        self.landed: Callable[[int], None] = lambda round: None
        self.late = 0
        """Rounds whose mean was taken without this worker."""

    def new(self, round: int, steps: int, seconds: float) -> Delivery:
        """Deliver."""
        return Delivery(self.line, round, steps, seconds, self._alone.transport.now())

    def group(self, decision: RoundDecision, seconds: float) -> Group:
        """The group of an attempt, whose members may be late by so many seconds."""
        waits = self._alone.deadlines
        return replace(
            self._alone,
            ranks=decision.members,
            view=max(decision.view, 0),
            deadlines=replace(waits, outer=waits.outer + seconds),
        )

    def fail(self, delivery: Delivery, error: CommError) -> None:
        """Tell that the exchange of `delivery` has failed here, and whom that speaks of."""
        self.line.report_peer(delivery.round, delivery.attempt, error)
        delivery.answered(None, self._alone.transport.now())

    def missed(self, delivery: Delivery) -> MissedMean | None:
        """The mean that was taken without it, once it has landed there. None where it cannot be had now."""
        while not self.line.is_over and self.line.has_answers:
            decision = self.line.decisions.of(delivery.round)
            if decision is not None and decision.outcome == "land":
                found = self.fetch(decision)
                if found is None:
                    self.line.reload()
                return found
            delivery.wait()
            delivery.look(self._alone.transport.now())
            delivery.say()
        return None

    def is_missed(self, decision: RoundDecision) -> bool:
        """Whether somebody of the round's view was late, and this worker is one of those who keep the mean for it."""
        view = self.line.state.view_of(decision.round)
        keeps = self.line.member in decision.members[:MEAN_HOLDERS]
        return keeps and view is not None and not set(view.members) <= set(decision.members)
