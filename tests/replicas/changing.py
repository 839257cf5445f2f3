"""A roster whose views are given in advance: a world that changes, on the virtual backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from isles.comm.errors import CommError, PeerLost
from isles.comm.group import Group
from isles.comm.roster import RoundOutcome
from isles.membership.messages import View


class ChangingRoster:
    """See `isles.comm.roster.Roster`. log: (member, class of the error) of what was missed, in order."""

    grows = True
    answers_alike = False

    def __init__(self, world: Group, views: Sequence[View]) -> None:
        self.world, self.views = world, views
        self.member = world.transport.rank
        self.log: list[tuple[int, str]] = []
        self._lost: set[int] = set()
        self._answers: dict[int, Group] = {}
        self.founders = self._members(views[0])

    def group(self, round: int) -> Group:
        if round not in self._answers:
            view = next(view for view in reversed(self.views) if view.since <= round)
            self._answers[round] = self._members(view)
        return self._answers[round]

    def lost(self, member: int) -> bool:
        return member in self._lost

    def has_lost(self, members: Sequence[int]) -> bool:
        return any(self.lost(member) for member in members)

    def report_failure(self, member: int, error: CommError) -> None:
        self.log.append((member, type(error).__name__))
        if isinstance(error, PeerLost):
            self._lost.add(member)

    def may_apply(self, round: int, members: Sequence[int], *, whole: bool) -> bool:
        return whole

    def start_round(self, round: int) -> tuple[Group, int] | None:
        return self.group(round), 0

    def finish_round(
        self, round: int, attempt: int, digest: int | None, error: CommError | None = None
    ) -> RoundOutcome:
        if error is not None:
            raise error
        return "land"

    def survivors(self, asked: bool) -> Group:
        newest = self._answers[max(self._answers)] if self._answers else self.founders
        return newest.answering("eval") if asked else newest

    def state_dict(self) -> dict[str, Any]:
        return {"lost": sorted(self._lost)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._lost = set(state.get("lost", ()))

    def _members(self, view: View) -> Group:
        """With the ledger that `world` has now: who comes back has counted nothing."""
        members = view.members if self.member in view.members else (self.member,)
        return replace(self.world, ranks=members, channel="outer", view=view.number)
