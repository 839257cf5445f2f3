"""The roster of a world that changes: views as this worker knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from isles.comm.elastic.company import Company
from isles.comm.errors import CommError
from isles.comm.group import Group


class ElasticRoster:
    """See `isles.comm.roster.Roster`. alone: the group of this worker by itself, which starts alone: its weights are
    drawn as everybody's are, or taken from a member.
    """

    grows = True

    def __init__(self, company: Company, alone: Group) -> None:
        self.company, self.founders = company, alone

    def group(self, round: int) -> Group:
        standing = self.company.standing(round)
        return replace(self.founders, ranks=standing.seats, view=max(standing.view, 0))

    def lost(self, seat: int) -> bool:
        return self.company.lost(seat)

    def miss(self, seat: int, error: CommError) -> None:
        """Who is gone the network tells; who is only late is met again."""

    def accepts(self, round: int, seats: Sequence[int]) -> bool:
        return self.company.accepts(round, seats)

    def survivors(self, asked: bool) -> Group:
        """Itself: the one model is put together at the lighthouse."""
        return self.founders

    def state_dict(self) -> dict[str, Any]:
        """Nothing: what is not known here the lighthouse knows."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""
