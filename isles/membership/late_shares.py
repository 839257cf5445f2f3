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

    def __init__(self, client: MembershipClient, round: int, steps: int, seconds: float, now: float) -> None:
        self.round, self.steps = round, steps
        self.decision: RoundDecision | None = None
        self._client, self._sent_at = client, now
        self._state = RoundState(client.member, round, 0, (client.member,))
        self._message: Delivered | Done = Delivered(round, steps, seconds)
        self._failed = -1  # the newest attempt that did
        answer = client.ask(self._message)
        if isinstance(answer, RoundDecision):
            client.decisions.hear(answer)

    @property
    def attempt(self) -> int:
        """The number of the exchange that is being made, or waits for its word."""
        return self._state.attempt

    @property
    def factor(self) -> float:
        """What this worker's share is scaled by, so that the mean of all is one by inner steps."""
        assert self.decision is not None and self.decision.steps
        return len(self.decision.steps) * self.steps / sum(self.decision.steps)

    def look(self, now: float) -> Phase:
        """The phase that it is in now. What was told is told again now and then, for words may be lost."""
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
        """The exchange of this attempt has an answer with that hash, or failed."""
        if digest is None:
            self._failed = self._state.attempt
        else:
            self._state = self._state.answered(self._state.attempt)
        self._message, self._sent_at = Done(self.round, self._state.attempt, NOTHING if digest is None else digest), now
        self._client.say(self._message)

    def say(self) -> None:
        """Tell it again."""
        self._client.say(self._message)

    def wait(self) -> None:
        """Wait until there is something new to look at, a moment at most."""
        known = self.decision
        self._client.wait(lambda: self._client.is_over or self._client.decisions.of(self.round) != known, _SOON)


class Deliveries:
    """How a worker makes them. alone: its group of itself. fetch: a mean that it missed, None where nobody gives it;
    landed: called after each landing with its round.
    """

    def __init__(self, client: MembershipClient, alone: Group) -> None:
        self.client, self._alone = client, alone
        self.fetch: Callable[[RoundDecision], MissedMean | None] = lambda decision: None
        self.landed: Callable[[int], None] = lambda round: None
        self.late = 0
        """Rounds whose mean was taken without this worker."""

    def new(self, round: int, steps: int, seconds: float) -> Delivery:
        """Deliver."""
        return Delivery(self.client, round, steps, seconds, self._alone.transport.now())

    def group(self, decision: RoundDecision, seconds: float) -> Group:
        """The group of an attempt, whose members may be late by so many seconds."""
        is_waiting = self._alone.deadlines
        return replace(
            self._alone,
            ranks=decision.members,
            view=max(decision.view, 0),
            deadlines=replace(is_waiting, outer=is_waiting.outer + seconds),
        )

    def fail(self, delivery: Delivery, error: CommError) -> None:
        """Tell that the exchange of `delivery` has failed here, and whom that speaks of."""
        self.client.report_peer(delivery.round, delivery.attempt, error)
        delivery.answered(None, self._alone.transport.now())

    def missed(self, delivery: Delivery) -> MissedMean | None:
        """The mean that was taken without it, once it has landed there. None where it cannot be had now."""
        while not self.client.is_over and self.client.has_answers:
            decision = self.client.decisions.of(delivery.round)
            if decision is not None and decision.outcome == "land":
                found = self.fetch(decision)
                if found is None:
                    self.client.reload()
                return found
            delivery.wait()
            delivery.look(self._alone.transport.now())
            delivery.say()
        return None

    def is_missed(self, decision: RoundDecision) -> bool:
        """Whether somebody of the round's view was late, and this worker is one of those who keep the mean for it."""
        view = self.client.state.view_of(decision.round)
        keeps = self.client.member in decision.members[:MEAN_HOLDERS]
        return keeps and view is not None and not set(view.members) <= set(decision.members)
