"""A swarm with an outer method: the peers of a stage are its replicas.

An exchange is among the peers of a stage that all agreed on in the step before it.
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
    """See `isles.comm.roster.Roster`. alone: the group of this worker only, over the real transport, for an optimizer's
    construction; `serve` sets the swarm.

    Rounds with one mean for all: the peers of all stages decide together (`Agreement`), so the remaining peers of a
    stage apply the same answer. After a loss all stages repeat the round among the remaining peers. Rounds of pairs: a
    peer that has lost its partner does the round without one.
    """

    grows = True
    answers_alike = False

    def __init__(self, alone: Group) -> None:
        self.founders = alone
        self._ledger = Ledger(trust=alone.ledger.trust)

    def serve(self, swarm: Swarm) -> None:
        """Set the swarm of which this worker is a peer."""
        self._swarm, self._inbox = swarm, swarm.agreement.inbox

    def group(self, round: int) -> Group:
        return self._among(self._swarm.peers(self._stage))

    def lost(self, member: int) -> bool:
        return self._inbox.queue.group.ranks.index(member) in self._inbox.queue.lost

    def has_lost(self, members: Sequence[int]) -> bool:
        return any(self.lost(member) for member in members)

    def report_failure(self, member: int, error: CommError) -> None:
        """Refuse a member that sent an invalid message. A late one is awaited again at the end of the step."""
        if isinstance(error, (Malformed, Refused, Diverged, Elsewhere)):
            self._inbox.queue.refuse(self._inbox.queue.group.ranks.index(member), error)

    def may_apply(self, round: int, members: Sequence[int], *, whole: bool) -> bool:
        return whole

    def start_round(self, round: int) -> tuple[Group, int] | None:
        """The agreed peers, including those that only this worker has lost, so that all use the same group; and the
        epoch, which numbers the attempt.
        """
        return self.group(round), self._inbox.epoch

    def finish_round(
        self, round: int, attempt: int, digest: int | None, error: CommError | None = None
    ) -> RoundOutcome:
        """Agree with all remaining peers on the outcome; blocks until they have voted. DeadlinePassed if one is silent;
        Diverged if the digests of this stage's peers differ.
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
        """Only this worker after rounds with one mean, as all have the same weights; else its stage's peers that
        answer.
        """
        if not asked:
            return self.founders
        lost = self._swarm.agreement.lost
        return self._among([peer for peer in self._swarm.peers(self._stage) if peer not in lost]).answering("eval")

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a resumed run begins with all peers."""
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
    """Each peer's gradient is the mean over the microbatches that it has counted itself; one that has counted none
    takes no step. The guarantee holds for the step's microbatches: each is counted once at every stage. A lost peer's
    updates since the last exchange are lost, as a worker's in DiLoCo. A norm is the root of the sum over stages of the
    mean square norm of the peers that have a gradient.
    """

    @override
    def _gradient(self, counted: int) -> Tensor | None:
        own = len(self.peer.tally.counted)
        return self._mean(self._own(), own) if own else self._own()[:0]

    @override
    def lacks(self, settled: Collection[int]) -> bool:
        return len(settled) > len(self.agreement.members)
