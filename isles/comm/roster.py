"""Who takes part in which round of an outer method, and whom this worker has lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from isles.comm.errors import CommError, Diverged, Malformed, PeerLost, Refused
from isles.comm.group import Group

RoundOutcome = Literal["land", "retry", "postpone"]
"""What becomes of an attempt: its answer is everybody's; the round is tried again (`Roster.opening`); nobody can say
now, or this worker has no part in it any more.
"""
_REFUSALS = 3  # payloads of one that cannot be, after which nobody waits for it any more


@runtime_checkable
class Roster(Protocol):
    """The members of rounds 1, 2, ... as this worker knows them; see `isles.membership.views.View` for members.

    The first answer for a round is final, for whoever asks has begun it; answers for rounds that have not landed belong
    to the state.
    """

    @property
    def founders(self) -> Group:
        """Who starts together. Its size and this worker's position in it are what a run is planned with."""

    @property
    def grows(self) -> bool:
        """Whether others than the founders may take part in later rounds."""

    @property
    def answers_alike(self) -> bool:
        """Whether all workers of an island get the same answers, and land a round together or not at all: each then
        asks the same things in the same order.
        """

    def group(self, round: int) -> Group:
        """The members of `round`, lost ones included: all must draw pairs from the same list. This worker alone where
        it is not a member, or does not know.
        """

    def lost(self, member: int, /) -> bool:
        """Whether `member` is waited for no more."""

    def has_lost(self, members: Sequence[int], /) -> bool:
        """Whether one of `members`, the members of a round, is lost: then this worker does it alone."""

    def report_failure(self, member: int, /, error: CommError) -> None:
        """An exchange with `member` (-1: with somebody) has ended in `error`."""

    def may_apply(self, round: int, members: Sequence[int], /, *, whole: bool) -> bool:
        """The exchange of `round` among `members` is over, and whole here or not: whether its answer may be used."""

    def start_round(self, round: int) -> tuple[Group, int] | None:
        """Among whom a round that all land together or not at all is exchanged now, and the number of this attempt.
        None: that cannot be said now.
        """

    def finish_round(
        self, round: int, attempt: int, digest: int | None, error: CommError | None = None
    ) -> RoundOutcome:
        """Whether an attempt of such a round lands. digest: hash of its answer; None where it has none, for `error`.
        Blocks until that is known; "postpone" where it cannot be.
        """

    def survivors(self, asked: bool) -> Group:
        """The workers of the newest view; with `asked` those of them that answer now: all must ask together."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: what a checkpoint holds."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; from {}: nobody is lost."""


class FixedRoster:
    """`founders` in every round; whose connection breaks is lost for good, and who sent thrice what cannot be."""

    grows = False
    answers_alike = False

    def __init__(self, founders: Group) -> None:
        self.founders = founders
        self._lost: set[int] = set()
        self._refused: Counter[int] = Counter()

    def group(self, round: int) -> Group:
        return self.founders

    def lost(self, member: int) -> bool:
        return member in self._lost

    def has_lost(self, members: Sequence[int]) -> bool:
        return not self._lost.isdisjoint(members)

    def report_failure(self, member: int, error: CommError) -> None:
        """Who is only late is met again; who sends what cannot be, only so often."""
        if isinstance(error, (Refused, Malformed, Diverged)):
            self._refused[member] += 1
            if self._refused[member] >= _REFUSALS and member in self.founders.ranks:
                self._lost.add(member)
        if isinstance(error, PeerLost) and member in self.founders.ranks:
            self._lost.add(member)

    def may_apply(self, round: int, members: Sequence[int], *, whole: bool) -> bool:
        return whole

    def start_round(self, round: int) -> tuple[Group, int] | None:
        return self.founders, 0

    def finish_round(
        self, round: int, attempt: int, digest: int | None, error: CommError | None = None
    ) -> RoundOutcome:
        if error is not None:
            raise error
        return "land"

    def survivors(self, asked: bool) -> Group:
        if not asked:
            return self.founders
        left = [position for position, member in enumerate(self.founders.ranks) if member not in self._lost]
        return self.founders.among(left).answering("eval")

    def state_dict(self) -> dict[str, Any]:
        return {"lost": sorted(self._lost), "refused": [list(each) for each in sorted(self._refused.items())]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._lost = set(state.get("lost", ()))
        self._refused = Counter(dict(state.get("refused", ())))


def as_roster(group: Group | Roster) -> Roster:
    """A group's roster is the one that never changes. ValueError for what is neither."""
    if isinstance(group, Group):
        return FixedRoster(group)
    if not isinstance(group, Roster):
        raise ValueError(f"group is a {type(group).__name__}: pass a group of workers, such as world.outer")
    return group
