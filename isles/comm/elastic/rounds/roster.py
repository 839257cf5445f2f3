"""Who takes part in each exchange of a world that changes, by the views that the leader of this member knows of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from isles.comm.elastic.rounds.decision import Decision
from isles.comm.elastic.rounds.island import IslandGroup
from isles.comm.elastic.rounds.leader import KEPT, RoundLeader
from isles.comm.errors import CommError, Malformed
from isles.comm.group import Group
from isles.comm.roster import Ruling


class ElasticRoster:
    """An `isles.comm.roster.Roster`: of a worker by itself, or of each worker of an island, which all ask it the same
    things in the same order. What is to be decided its leader decides, and all obey.

    alone: the group of this member by itself. A worker starts alone, because its weights are drawn as everybody's are,
    or taken from a member. places: the workers of its island. leader: None at a follower.
    """

    grows = answers_alike = True

    def __init__(self, alone: Group, places: IslandGroup, leader: RoundLeader | None) -> None:
        self.founders, self._places, self._leader = alone, places, leader
        self.deliveries = None if leader is None else leader.deliveries
        self._answers: dict[int, Group] = {}
        self._missed: CommError | None = None  # a follower's, of the exchange that is asked about next

    def group(self, round: int) -> Group:
        if round not in self._answers:
            group = self._met(self._places.next_decision(lambda: self._lead.exchange(round)))
            self._answers = {**{r: a for r, a in self._answers.items() if r > round - KEPT}, round: group}
        return self._answers[round]

    def lost(self, seat: int) -> bool:
        return self._leader is not None and self._leader.lost(seat)

    def lacks(self, seats: Sequence[int]) -> bool:
        return len(seats) > 1 and self._places.settle(lambda: any(self.lost(seat) for seat in seats))

    def miss(self, seat: int, error: CommError) -> None:
        if self._leader is not None:
            self._leader.miss(seat, error)
        else:
            self._missed = self._missed or error

    def accepts(self, round: int, seats: Sequence[int], *, whole: bool) -> bool:
        missed, self._missed = self._missed, None
        if len(seats) <= 1 or self._places.size == 1:
            return whole and (self._leader is None or self._leader.accepts(round, seats))
        digest, failure = self._places.combine(round, 0, 0 if whole else None, missed, self.founders.deadlines.outer)
        return self._places.settle(lambda: self._lead.accepts(round, seats, digest, failure))

    def start_round(self, round: int) -> tuple[Group, int] | None:
        made = self._places.next_decision(lambda: self._lead.start_round(round))
        return (self._met(made), made.attempt) if made.kind == "exchange" else None

    def finish_round(self, round: int, attempt: int, digest: int | None, error: CommError | None = None) -> Ruling:
        together, failure = self._places.combine(round, attempt, digest, error, self.founders.deadlines.outer)
        made = self._places.next_decision(lambda: self._lead.finish_round(round, attempt, together, error or failure))
        if made.kind not in ("land", "retry", "postpone"):
            raise Malformed(-1, f"of an attempt the leader of this island decides to {made.kind}")
        return made.kind

    def begin_anew(self) -> None:
        """This worker has another state: answers about its rounds before are not valid any more."""
        self._answers, self._missed = {}, None
        if self._leader is not None:
            self._leader.begin_anew()

    def survivors(self, asked: bool) -> Group:
        """Itself: the one model is put together at the lighthouse."""
        return self.founders

    def state_dict(self) -> dict[str, Any]:
        """Nothing: what is not known here the lighthouse knows."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    @property
    def _lead(self) -> RoundLeader:
        assert self._leader is not None, "a follower is never asked"
        return self._leader

    def _met(self, made: Decision) -> Group:
        """Who takes part, and how long it is waited for. Malformed."""
        if made.kind != "exchange" or not made.members:
            raise Malformed(-1, f"in place of an exchange the leader of this island decides to {made.kind}")
        waits = replace(self.founders.deadlines, outer=made.seconds)
        return replace(self.founders, ranks=made.members, view=made.view, deadlines=waits)
