"""Who takes part in which exchange of an outer method, in a swarm: the peers of a stage, as all have agreed in the step
that the exchange follows.

A swarm with an outer method: peers of a stage are its replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from isles.comm.call import Ledger
from isles.comm.errors import CommError, DeadlinePassed, Diverged, Elsewhere, Malformed, PeerLost, Refused
from isles.comm.group import Group
from isles.comm.roster import RoundOutcome
from isles.pipeline.swarm.swarm import Swarm

_LANDS, _FAILED = 1, 0


class SwarmRoster:
    """See `isles.comm.roster.Roster`. alone: the group of this worker by itself, over the real transport, with which an
    optimizer begins; `serve` says which swarm it is a peer of.

    Rounds with one mean for all: the peers of all stages rule together (`Agreement`), so those of a stage that are left
    land the same answer. Where somebody was lost on the way, all stages try again: the round is then of those who are
    left. Rounds of pairs: whoever has lost its partner does the round alone.
    """

    grows = True
    answers_alike = False

    def __init__(self, alone: Group) -> None:
        self.founders = alone
        self._ledger = Ledger(trust=alone.ledger.trust)

    def serve(self, swarm: Swarm) -> None:
        """The peers are this swarm's from now on."""
        self._swarm, self._inbox = swarm, swarm.agreement.inbox

    def group(self, round: int) -> Group:
        return self._among(self._swarm.peers(self._stage))

    def lost(self, member: int) -> bool:
        return self._inbox.queue.group.ranks.index(member) in self._inbox.queue.lost

    def has_lost(self, members: Sequence[int]) -> bool:
        return any(self.lost(member) for member in members)

    def report_failure(self, member: int, error: CommError) -> None:
        """Who is only late is met again, at the end of the step at the latest. Who sent what cannot be is not."""
        if isinstance(error, (Malformed, Refused, Diverged, Elsewhere)):
            self._inbox.queue.refuse(self._inbox.queue.group.ranks.index(member), error)

    def may_apply(self, round: int, members: Sequence[int], *, whole: bool) -> bool:
        return whole

    def start_round(self, round: int) -> tuple[Group, int] | None:
        """Among those whom all have agreed on, with whom this worker alone has lost: all exchange among the same ones.
        An attempt is the epoch that it belongs to.
        """
        return self.group(round), self._inbox.epoch

    def finish_round(
        self, round: int, attempt: int, digest: int | None, error: CommError | None = None
    ) -> RoundOutcome:
        """Blocks until all who are left have said what they have. DeadlinePassed for who is silent; Diverged where
        peers of this stage have other answers.
        """
        if isinstance(error, DeadlinePassed):
            raise error
        if error is not None and not isinstance(error, PeerLost):
            self.report_failure(getattr(error, "peer", -1), error)
        votes = self._swarm.agreement.agree([_FAILED if digest is None else _LANDS, digest or 0])
        self._swarm.apply_placement()
        if not all(vote[0] == _LANDS for vote in votes.values()):
            return "retry"
        for peer in self._swarm.peers(self._stage):
            if votes[peer][1] != digest:
                rank = self._inbox.queue.group.ranks[peer]
                raise Diverged(rank, round, "it has another answer of an exchange than this worker")
        return "land"

    def survivors(self, asked: bool) -> Group:
        """Of rounds with one mean this worker alone, for all hold the same; else its stage's peers that answer."""
        if not asked:
            return self.founders
        lost = self._swarm.agreement.lost
        return self._among([peer for peer in self._swarm.peers(self._stage) if peer not in lost]).answering("eval")

    def state_dict(self) -> dict[str, Any]:
        """Nothing: whoever resumes begins with all peers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    @property
    def _stage(self) -> int:
        return self._swarm.stages[self._swarm.me]

    def _among(self, positions: Sequence[int]) -> Group:
        ranks = self._inbox.queue.group.ranks
        members = tuple(ranks[position] for position in positions)
        return Group(self._swarm.agreement.transport, members, "outer", self.founders.deadlines, self._ledger)


class OwnSwarm(Swarm):
    """Each peer steps on the mean over the microbatches that it has counted itself; one that has counted none has no
    gradient, and takes no step. The guarantee is then one of the step's microbatches: each is counted once at every
    stage. What a lost peer had learned since the last exchange is lost with it, as a worker's is in DiLoCo. A norm is
    made of the stages' mean squares over the peers that have a gradient.
    """

    @override
    def _gradient(self, counted: int) -> Tensor | None:
        own = len(self.peer.tally.counted)
        return self._mean(self._own(), own) if own else self._own()[:0]

    @override
    def lacks(self, settled: Collection[int]) -> bool:
        return len(settled) > len(self.agreement.members)
