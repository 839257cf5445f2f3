"""The workers that take part in each round of an outer method, and those that this worker has lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from isles.comm.errors import CommError, Diverged, Malformed, PeerLost, Refused
from isles.comm.group import Group

RoundOutcome = Literal["land", "retry", "postpone"]
"""Outcome of an attempt. land: all members apply its answer. retry: they try the round again (`Roster.start_round`).
postpone: the outcome is not known now, or this worker no longer takes part.
"""
_REFUSALS = 3  # invalid payloads of a worker after which it counts as lost


@runtime_checkable
class Roster(Protocol):
    """The members of rounds 1, 2, ... as this worker knows them, by rank or member id.

    The first reply about a round is final, because the worker that asks has begun it. The state includes the replies
    about rounds that have not landed.
    """

    @property
    def founders(self) -> Group:
        """The workers that start together. The run is planned with their number and this worker's position."""

    @property
    def grows(self) -> bool:
        """Whether workers that are not founders may join later rounds."""

    @property
    def answers_alike(self) -> bool:
        """Whether all workers of an island get the same replies, and land a round together or not at all. Then each
        must call the same methods in the same order.
        """

    def group(self, round: int) -> Group:
        """The members of `round`, lost ones included, so that all draw pairs from the same list. If this worker is not
        a member, or does not know the members, the group is this worker alone.
        """

    def lost(self, member: int, /) -> bool:
        """Whether `member` is lost, so that nobody waits for it."""

    def has_lost(self, members: Sequence[int], /) -> bool:
        """Whether one of a round's `members` is lost. This worker then does the round alone."""

    def report_failure(self, member: int, /, error: CommError) -> None:
        """Report that an exchange with `member` (-1: unknown) failed with `error`."""

    def may_apply(self, round: int, members: Sequence[int], /, *, whole: bool) -> bool:
        """Whether the answer of an exchange may be applied. whole: it is complete on this worker."""

    def start_round(self, round: int) -> tuple[Group, int] | None:
        """Start an attempt at a round that all members land or none: (members, attempt). None: not known now."""

    def finish_round(
        self, round: int, attempt: int, digest: int | None, error: CommError | None = None
    ) -> RoundOutcome:
        """Wait for the outcome of an attempt. digest: hash of its answer; None: it failed with `error`."""

    def survivors(self, asked: bool) -> Group:
        """The workers of the newest view. asked: only those that respond now; all workers must call this together."""

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, JSON-able."""

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
        """Count bad payloads: the `_REFUSALS`-th loses the worker. A late worker is not lost."""
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
        return {"lost": sorted(self._lost), "refused": [list(pair) for pair in sorted(self._refused.items())]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._lost = set(state.get("lost", ()))
        self._refused = Counter(dict(state.get("refused", ())))


def as_roster(group: Group | Roster) -> Roster:
    """Convert a group to a roster that never changes; return a roster as it is. ValueError for anything else."""
    if isinstance(group, Group):
        return FixedRoster(group)
    if not isinstance(group, Roster):
        raise ValueError(f"group is a {type(group).__name__}: pass a group of workers, such as world.outer")
    return group
