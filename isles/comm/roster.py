"""Which workers take part in which round of an outer method, and which of them this worker has lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from isles.comm.errors import CommError, Diverged, Malformed, PeerLost, Refused
from isles.comm.group import Group

RoundOutcome = Literal["land", "retry", "postpone"]
"""Of an attempt: all apply its answer; the round is tried again (`Roster.start_round`); the outcome cannot be known
now, or this worker takes no part any more.
"""
_REFUSALS = 3  # invalid payloads of a worker after which it counts as lost


@runtime_checkable
class Roster(Protocol):
    """The members of rounds 1, 2, ... as this worker knows them, by rank or member id.

    The first answer for a round is final, because the worker that asks has begun it; answers for rounds that have not
    landed belong to the state.
    """

    @property
    def founders(self) -> Group:
        """The workers that start together: a run is planned with their number and this worker's position."""

    @property
    def grows(self) -> bool:
        """Whether later rounds may have members that are no founders."""

    @property
    def answers_alike(self) -> bool:
        """Whether all workers of an island get the same answers, and land a round together or not at all. Each must
        then call the same methods in the same order.
        """

    def group(self, round: int) -> Group:
        """The members of `round`, lost ones included, so that all draw pairs from the same list. This worker alone
        where it is not a member, or does not know.
        """

    def lost(self, member: int, /) -> bool:
        """Whether to wait for `member` no more."""

    def has_lost(self, members: Sequence[int], /) -> bool:
        """Whether one of `members`, those of a round, is lost: this worker then does the round alone."""

    def report_failure(self, member: int, /, error: CommError) -> None:
        """An exchange with `member` (-1: unknown) has ended in `error`."""

    def may_apply(self, round: int, members: Sequence[int], /, *, whole: bool) -> bool:
        """Whether the answer of an exchange may be used. whole: it is complete on this worker."""

    def start_round(self, round: int) -> tuple[Group, int] | None:
        """(members, number of this attempt) of a round that all land together or not at all. None: not known now."""

    def finish_round(
        self, round: int, attempt: int, digest: int | None, error: CommError | None = None
    ) -> RoundOutcome:
        """Block for the outcome of an attempt of such a round. digest: hash of its answer; None: none, for `error`."""

    def survivors(self, asked: bool) -> Group:
        """The workers of the newest view; with `asked` those that answer now, where all workers call it together."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: what a checkpoint holds."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; {}: nobody is lost."""


class FixedRoster:
    """`founders` in every round. A worker is lost for good if its connection breaks or it sends three bad payloads."""

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
        """A late worker is waited for again, one with bad payloads `_REFUSALS` times."""
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
