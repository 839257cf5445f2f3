"""A roster whose views are given in advance: a world that changes, on the virtual backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from isles.comm.errors import CommError, PeerLost
from isles.comm.group import Group
from isles.comm.roster import Ruling
from isles.membership.views import View


class ChangingRoster:
    """See `isles.comm.roster.Roster`. log: (seat, class of the error) of what was missed, in order."""

    grows = True
    answers_alike = False

    def __init__(self, world: Group, views: Sequence[View]) -> None:
        self.world, self.views = world, views
        self.seat = world.transport.rank
        self.log: list[tuple[int, str]] = []
        self._lost: set[int] = set()
        self._answers: dict[int, Group] = {}
        self.founders = self._members(views[0])

    def group(self, round: int) -> Group:
        if round not in self._answers:
            view = next(view for view in reversed(self.views) if view.since <= round)
            self._answers[round] = self._members(view)
        return self._answers[round]

    def lost(self, seat: int) -> bool:
        return seat in self._lost

    def lacks(self, seats: Sequence[int]) -> bool:
        return any(self.lost(seat) for seat in seats)

    def miss(self, seat: int, error: CommError) -> None:
        self.log.append((seat, type(error).__name__))
        if isinstance(error, PeerLost):
            self._lost.add(seat)

    def accepts(self, round: int, seats: Sequence[int], *, whole: bool) -> bool:
        return whole

    def start_round(self, round: int) -> tuple[Group, int] | None:
        return self.group(round), 0

    def finish_round(self, round: int, attempt: int, digest: int | None, error: CommError | None = None) -> Ruling:
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
        seats = view.seats if self.seat in view.seats else (self.seat,)
        return replace(self.world, ranks=seats, channel="outer", view=view.number)
