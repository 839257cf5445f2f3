"""A worker's share of a round with a quorum, while the worker trains on. Phases:

told        the lighthouse has the report; the worker looks for decisions between inner steps
exchanging  an attempt among the members that have delivered is to be made
done        the attempt has an answer here, or failed, and that is reported
landed      the answer is committed: land it
late        the mean was taken without this share, and is to be fetched
over        this worker takes no part in the run now
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from isles.comm.errors import CommError
from isles.comm.group import Group
from isles.membership.round_commit import NOTHING, Delivered, Done, RoundDecision, RoundState

if TYPE_CHECKING:
    from isles.membership.client import MembershipClient

MEAN_HOLDERS = 2  # the first so many members that landed a mean save it for late members: one may be lost
_SOON = 0.3  # seconds until a report is repeated: it, or its reply, may be lost
Phase = Literal["told", "exchanging", "done", "landed", "late", "over"]


@dataclass(frozen=True, slots=True)
class MissedMean:
    """What others landed in a round without this worker: the mean (n,) of `participants` shares; whole: it was not
    skipped; digest: of the anchor after it. left_out: members that take no part since then, see `MemberState.left_out`.
    """

    mean: Tensor
    participants: int
    whole: bool
    digest: int
    left_out: Mapping[int, int]


class Delivery:
    """This worker's delivery for `round`: the work of `steps` inner steps. seconds: until its next exchange, 0 if
    unknown. decision: the newest one on the round. The first report waits for a reply, so that a late worker knows at
    once.
    """

    def __init__(self, client: MembershipClient, round: int, steps: int, seconds: float, now: float) -> None:
        self.round, self.steps = round, steps
        self.decision: RoundDecision | None = None
        self._client, self._sent_at = client, now
        self._state = RoundState(client.member, round, 0, (client.member,))
        self._message: Delivered | Done = Delivered(round, steps, seconds)
        self._failed = -1  # the newest failed attempt
        answer = client.ask(self._message)
        if isinstance(answer, RoundDecision):
            client.decisions.hear(answer)

    @property
    def attempt(self) -> int:
        """The number of the present attempt."""
        return self._state.attempt

    @property
    def factor(self) -> float:
        """Scales this worker's share, so that the mean of all is weighted by inner steps."""
        assert self.decision is not None and self.decision.steps
        return len(self.decision.steps) * self.steps / sum(self.decision.steps)

    def look(self, now: float) -> Phase:
        """The present phase. Repeats the last report now and then, because messages may be lost."""
        self.decision = self._client.decisions.of(self.round) or self.decision
        if self.decision is not None:
            self._state = self._state.apply(self.decision)
        if self._client.is_over:
            return "over"
        if self._state.phase == "landed":
            return "landed"
        is_without = self.decision is not None and self._client.member not in self.decision.members
        if is_without and (self._state.phase == "left out" or self._state.attempt == 0):
            return "late"
        is_waiting = self._state.attempt == 0 or self._state.phase == "done" or self._state.attempt == self._failed
        if is_waiting and now - self._sent_at >= _SOON:
            self._sent_at = now
            self._client.say(self._message)
        return "exchanging" if not is_waiting else "told" if self._state.attempt == 0 else "done"

    def answered(self, digest: int | None, now: float) -> None:
        """The present attempt has an answer with hash `digest`, or failed (None)."""
        if digest is None:
            self._failed = self._state.attempt
        else:
            self._state = self._state.answered(self._state.attempt)
        self._message, self._sent_at = Done(self.round, self._state.attempt, NOTHING if digest is None else digest), now
        self._client.say(self._message)

    def say(self) -> None:
        """Repeat the last report."""
        self._client.say(self._message)

    def wait(self) -> None:
        """Wait a moment, or until there is a new decision."""
        known = self.decision
        self._client.wait(lambda: self._client.is_over or self._client.decisions.of(self.round) != known, _SOON)


class Deliveries:
    """A worker's deliveries. alone: its group of itself. fetch: fetches a mean that it missed; None if nobody serves
    it. landed: called with the round after each landing.
    """

    def __init__(self, client: MembershipClient, alone: Group) -> None:
        self.client, self._alone = client, alone
        self.fetch: Callable[[RoundDecision], MissedMean | None] = lambda decision: None
        self.landed: Callable[[int], None] = lambda round: None
        self.late = 0
        """Number of rounds whose mean was taken without this worker."""

    def new(self, round: int, steps: int, seconds: float) -> Delivery:
        """Report a share to the lighthouse."""
        return Delivery(self.client, round, steps, seconds, self._alone.transport.now())

    def group(self, decision: RoundDecision, seconds: float) -> Group:
        """The group of an attempt; its members get `seconds` more."""
        is_waiting = self._alone.deadlines
        return replace(
            self._alone,
            ranks=decision.members,
            view=max(decision.view, 0),
            deadlines=replace(is_waiting, outer=is_waiting.outer + seconds),
        )

    def fail(self, delivery: Delivery, error: CommError) -> None:
        """Report that the attempt has failed here, and which member the error names."""
        self.client.report_peer(delivery.round, delivery.attempt, error)
        delivery.answered(None, self._alone.transport.now())

    def missed(self, delivery: Delivery) -> MissedMean | None:
        """Wait until the round has landed without this worker, and fetch its mean. None if it cannot be had now."""
        while not self.client.is_over and self.client.has_answers:
            decision = self.client.decisions.of(delivery.round)
            if decision is not None and decision.outcome == "land":
                mean = self.fetch(decision)
                if mean is None:
                    self.client.reload()
                return mean
            delivery.wait()
            delivery.look(self._alone.transport.now())
            delivery.say()
        return None

    def is_missed(self, decision: RoundDecision) -> bool:
        """Whether a member of the round's view was late, and this worker is to save the mean for it."""
        view = self.client.state.view_of(decision.round)
        keeps = self.client.member in decision.members[:MEAN_HOLDERS]
        return keeps and view is not None and not set(view.members) <= set(decision.members)
