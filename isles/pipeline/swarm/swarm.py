"""A step of a swarm: microbatches are routed through the stages, the peers agree on the result, then it is applied.

    run      microbatches travel (`isles.pipeline.swarm.peer`)
    settle   the remaining peers agree on the members and on what each has counted, and repair what is wrong
    sum      the gradients of a stage over its peers, in the order of positions
    commit   all agree that all have the sum: only then does any peer take the step. Else settle again

Guarantee, by `consistency`, for any losses at any time, as long as every stage keeps a peer:

    exact     the gradient of every stage is that of the same microbatches, each counted once: what one process
              accumulates, up to the order of its sums. What a lost peer had counted is run again from its neighbours'
              ledgers, and what was counted twice is subtracted: a loss costs about the work that was lost
    strict    the same gradient without ledgers: after a loss the step begins again without the lost peer. No
              microbatch is sent to a second peer, so a peer that hangs ends the run with an error that names it
    relaxed   as in SWARM (arXiv 2301.11913): what a stage lacks is run again, and counts again wherever it was counted
              before; a stage divides by its own count, which is at least the microbatches of the step

Without a loss, and with every answer in time, all three are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isles.comm.collectives.message_queue import MessageHeader, QueuedMessage
from isles.comm.errors import CommError, Malformed, Refused
from isles.pipeline.peers.agreement import Agreement
from isles.pipeline.peers.inbox import ASK, MAX_JOINERS, MEAN, SHARD, as_bits, as_number
from isles.pipeline.swarm.ledger import as_words, from_words, lacking, plan_repairs
from isles.pipeline.swarm.peer import SwarmPeer
from isles.pipeline.swarm.placement import NOWHERE, PeerStats, StageChange, StagePlacement, origins


class StageSum:
    """The gradient sums of one peer, one at a time, identified by the epoch in which all peers of the stage begin them.
    A refused share closes the queue of its sender.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement, self._inbox = agreement, agreement.inbox
        self._me = agreement.me
        self._epoch = -1
        self._early: list[QueuedMessage] = []
        self._inbox.answers[SHARD] = self._inbox.answers[MEAN] = self._take

    def begin(self, peers: Sequence[int], own: Tensor) -> None:
        """Begin the sum of `own` (n,) over the positions `peers`, this one included. Bytes sent: 2 (p - 1) / p times
        those of `own`.
        """
        self._peers, self._epoch, count = list(peers), self._inbox.epoch, len(peers)
        self._bounds = [own.numel() * at // count for at in range(count + 1)]
        self._place = self._peers.index(self._me)
        self._parts: dict[int, Tensor] = {}
        self._done: set[int] = set()
        self._is_finite = bool(own.isfinite().all())  # a run that diverges does so everywhere
        self._total = torch.empty_like(own)
        for at, peer in enumerate(self._peers):
            share = own[self._bounds[at] : self._bounds[at + 1]]
            if peer == self._me:
                self._parts[peer] = share
            else:
                self._inbox.queue.send(peer, MessageHeader(SHARD, 0, self._epoch), share.view(torch.uint8))
        self._add_up()
        early, self._early = self._early, []
        for message in early:
            self._take(message)

    def result(self) -> Tensor | None:
        """Wait for the current sum. None if it is incomplete and this or another peer has lost one of the peers: others
        may lack the same shares, and nobody would send them. DeadlinePassed if no message arrives at all.
        """
        agreement, peers = self._agreement, set(self._peers)
        while True:
            self._inbox.sort()
            missing = peers - self._done - {self._me} | peers - self._parts.keys()
            if not missing:
                return self._total
            if self._inbox.queue.lost.keys() & peers or agreement.is_due:
                return None
            self._inbox.wait_for_news(agreement.patience, agreement.patience, min(missing))

    def _take(self, message: QueuedMessage) -> None:
        """Save a share of a sum that this peer begins later; drop one of an earlier sum, which has failed."""
        if message.header.attempt > self._epoch:
            self._early.append(message)
        elif message.header.attempt == self._epoch:
            self._read(message)

    def _read(self, message: QueuedMessage) -> None:
        """Read a share to be added up here, or another peer's part of the sum."""
        sender, is_sum = message.sender, message.header.kind == MEAN
        if sender not in self._peers:
            return
        at = self._peers.index(sender) if is_sum else self._place
        begin, end = self._bounds[at], self._bounds[at + 1]
        if message.body.numel() != (end - begin) * self._total.dtype.itemsize:
            rank = self._inbox.queue.group.ranks[sender]
            self._inbox.queue.refuse(sender, Malformed(rank, f"a share of {message.body.numel()} bytes"))
            return
        share = message.body.view(self._total.dtype)
        if self._is_finite and not share.isfinite().all():
            rank = self._inbox.queue.group.ranks[sender]
            self._inbox.queue.refuse(sender, Refused(rank, "a share that is not finite"))
            return
        if is_sum:
            self._total[begin:end] = share
            self._done.add(sender)
        else:
            self._parts[sender] = share
            self._add_up()

    def _add_up(self) -> None:
        if self._me in self._done or len(self._parts) < len(self._peers):
            return
        added = self._parts[self._peers[0]].clone()
        for peer in self._peers[1:]:
            added += self._parts[peer]
        self._total[self._bounds[self._place] : self._bounds[self._place + 1]] = added
        self._done.add(self._me)
        for peer in self._peers:
            if peer != self._me:
                self._inbox.queue.send(peer, MessageHeader(MEAN, 0, self._epoch), added.view(torch.uint8))


_NO_SQUARE = -1.0
"""The square norm in the vote of a peer without a gradient."""
NOBODY = -1
Votes = dict[int, tuple[int, ...]]
"""The peers' votes in an agreement, by position."""


class StageLost(CommError):
    """No peer of `stage` is left: nobody has its weights. why: why no other peer can serve it."""

    def __init__(self, stage: int, why: str = "") -> None:
        super().__init__(f"stage {stage} has no peer left" + (f": {why}" if why else ""))
        self.stage, self.why = stage, why

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.stage, self.why)


@dataclass(frozen=True, slots=True)
class SwarmStep:
    """The agreed results of a completed step. loss: mean over the microbatches, nats; norm: of the gradient over all
    stages; stage_norm: of this stage's gradient.
    """

    loss: float
    norm: float
    stage_norm: float
    members: tuple[int, ...]
    stats: Mapping[int, PeerStats]


class Swarm:
    """The steps of one peer. placement: equal at all peers.

    parameters: of this peer's stage; a step leaves the mean over its microbatches in their `.grad`. The norm of a stage
    is the root of the mean square norm over its peers, whose gradients are equal here.
    """

    def __init__(self, peer: SwarmPeer, parameters: Sequence[nn.Parameter], placement: StagePlacement) -> None:
        self.peer, self.agreement, self.parameters = peer, peer.agreement, list(parameters)
        self.placement, self.count = placement, len(placement.costs)
        self.microbatches, self.consistency = peer.config.microbatches, peer.config.swarm.consistency
        self.changes: list[StageChange] = []
        """The stage changes of the last `arrange`."""
        self._next: list[StageChange] = []
        self.number = 0
        """The number of the current step."""
        self.late: Tensor | None = None
        """Between two steps: the last step's gradient (n,), which the next step leaves in the parameters."""
        self.leaving = False
        """Whether this peer asks to leave. It leaves after a step, if its stage keeps another peer; otherwise a peer of
        another stage moves there first.
        """
        self.is_needed = False
        """Whether this peer asks to leave but no other can serve its stage."""
        self.wants_states = self.saves = False
        """Whether this peer asks all to save their states after the step; and whether any does: the same at all."""
        self.bare: set[int] = set()
        """Stages that would have no peer if all that ask to leave did; the same at all peers."""
        self._going: list[int] = []
        self._asking: dict[int, int] = {}  # by position, the stage that it wishes to serve
        self.sum = StageSum(self.agreement)
        self.agreement.inbox.answers[ASK] = lambda message: self._asking.update(
            {message.sender: message.header.number - 1}
        )
        if self.stages[self.me] != NOWHERE:
            self.apply_placement()

    @property
    def me(self) -> int:
        return self.agreement.me

    @property
    def stages(self) -> list[int]:
        """The stage that each position serves."""
        return self.placement.stages

    def peers(self, stage: int) -> list[int]:
        """Positions of the remaining peers of `stage`."""
        return [position for position in self.agreement.members if self.stages[position] == stage]

    def arrange(self) -> list[StageChange]:
        """Before a step: apply the agreed changes (peers that join, leave or change their stage)."""
        changes, self._next = self._next, []
        going, self._going = self._going, []
        self.agreement.remove_members(going)
        self.changes = [
            change for change in changes if change.before == NOWHERE or change.peer in self.agreement.members
        ]
        self.placement.apply(self.changes)
        comers = [change.peer for change in self.changes if change.before == NOWHERE]
        self.agreement.add_members(comers)
        for comer in comers:
            self._asking.pop(comer, None)
        return self.changes

    def state_dict(self) -> dict[str, Any]:
        """Between two steps, with nothing in flight: what routing depends on, and the pending moves."""
        moves = [[change.peer, change.before, change.after] for change in self._next if change.before != NOWHERE]
        stats = {"placement": self.placement.state_dict(), "peer": self.peer.state_dict(), "moves": moves}
        return stats | {"late": self.late}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; all peers do so together."""
        self.late = state["late"]
        self.placement.load_state_dict(state["placement"])
        self._next = [StageChange(*move) for move in state["moves"]]
        self.apply_placement()
        self.peer.load_state_dict(state["peer"])

    @property
    def donors(self) -> list[int]:
        """Peers of this peer's stage that have the stage's state."""
        fresh = {change.peer for change in self.changes}
        return [peer for peer in self.peers(self.stages[self.me]) if peer not in fresh]

    def rearrange(self, changes: Sequence[StageChange]) -> None:
        """Apply `changes` at once. Peers that were to join, leave or move before the next step have to ask again."""
        self._next, self._going = list(changes), []
        self.arrange()
        self.apply_placement()

    @property
    def asking(self) -> list[int]:
        """Requests to join that this peer has received, as `MAX_JOINERS` numbers of a vote (position and stage)."""
        here = sorted(self._asking.keys() - self.agreement.inbox.queue.lost.keys())[:MAX_JOINERS]
        asking = [(self._asking[peer] + 1) * len(self.stages) + peer for peer in here]
        return asking + [NOBODY] * (MAX_JOINERS - len(asking))

    def admissible(self, asked: Iterable[int]) -> list[int]:
        """The positions in `asked` that may join: those that have never served a stage (a peer that was removed keeps
        its stage). Records their wished stages in the placement.
        """
        wishes = {vote % len(self.stages): vote // len(self.stages) - 1 for vote in sorted(asked) if vote != NOBODY}
        self.placement.wishes = {peer: wish for peer, wish in wishes.items() if self.stages[peer] == NOWHERE}
        return sorted(self.placement.wishes)

    def close(self) -> None:
        """Await what is in flight between two steps (here: nothing). All peers call it together."""

    def step(self, rebuild: Callable[[], None] | None = None) -> SwarmStep:
        """Run one step. rebuild: called if a stage has lost all peers, to assign it one; then the step begins again.
        StageLost if that is not possible; PeerLost if the others have removed this peer; DeadlinePassed if a peer is
        silent that is not known to be lost.
        """
        while True:
            try:
                done = self._try()
                if done is not None:
                    return done
            except StageLost:
                if rebuild is None:
                    raise
                rebuild()
            self.peer.counts.restarted += 1

    def _try(self) -> SwarmStep | None:
        """Try the step once; None if it must begin again."""
        self._begin()
        whole = self.peer.run(self._mine(range(self.microbatches)))
        while (settled := self._settled(whole)) is not None:
            done = self._conclude(settled)
            if done is not None or self.consistency == "strict":
                return done
        return None

    def _begin(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.peer.forget()
        self.apply_placement()

    def apply_placement(self, rebuild: Callable[[], None] | None = None) -> None:
        """Give `peer` the remaining peers of each stage. rebuild: as in `step`."""
        stages = [self.peers(stage) for stage in range(self.count)]
        if all(stages):
            self.peer.set_stages(stages, self.stages[self.me])
        elif rebuild is None:
            raise StageLost(stages.index([]))
        else:
            rebuild()

    def _mine(self, todo: Sequence[int]) -> list[int]:
        """The microbatches of `todo` that begin here, shared out by the speeds of the first stage's peers."""
        if self.stages[self.me]:
            return []
        return origins(todo, {peer: self.placement.cost(peer) for peer in self.peers(0)})[self.me]

    # Settling

    def _settled(self, whole: bool) -> Votes | None:
        """The votes on counted microbatches, after repair; None if the step must begin again. whole: whether the run
        ended without a loss.
        """
        return self._strict(whole) if self.consistency == "strict" else self._repaired()

    def _strict(self, whole: bool) -> Votes | None:
        before = self.agreement.members
        votes = self.agreement.agree([*self._counted(), int(whole)])
        self.apply_placement()
        return votes if self.agreement.members == before and all(vote[2] for vote in votes.values()) else None

    def _repaired(self) -> Votes:
        while True:
            book = as_words(set(self.peer.tally.counted), self.microbatches)
            votes = self.agreement.agree([*self._counted(), *book])
            self.apply_placement()
            ledger = {position: from_words(vote[2:], self.microbatches) for position, vote in votes.items()}
            stages = self.peer.stages
            if self.consistency == "exact":
                found = plan_repairs(ledger, stages, self.microbatches)
                if found.none:
                    return votes
                self.peer.repair(found)
            elif todo := lacking(ledger, stages, self.microbatches):
                self.peer.run(self._mine(todo))
            else:
                return votes

    def _counted(self) -> list[int]:
        """How many microbatches this peer has added to its gradients, and the sum of their losses."""
        counted, _, losses = self.peer.tally
        return [len(counted), as_bits(float(sum(losses[number].double() for number in counted)))]

    def _conclude(self, settled: Votes) -> SwarmStep | None:
        """Complete the step once all remaining peers have its gradient. settled: the votes that `_settled` returned."""
        gradient = self._gradient(self._counted_here(settled))
        votes, asked = self._vote(gradient)
        if not all(stats.holds for stats in votes.values()) or self.lacks(settled):
            return None
        self._take_over(gradient)
        return self._conclude_step(votes, self._loss(settled), asked)

    def _counted_here(self, settled: Votes) -> int:
        """Microbatches that this stage's peers counted, by the votes `settled`."""
        return sum(vote[0] for position, vote in settled.items() if self.stages[position] == self.stages[self.me])

    def _loss(self, settled: Votes) -> float:
        last = [vote for position, vote in settled.items() if self.stages[position] == self.count - 1]
        return sum(as_number(vote[1]) for vote in last) / sum(vote[0] for vote in last)

    def _gradient(self, counted: int) -> Tensor | None:
        """The mean gradient of this peer's step (n,), empty if there is none; None if a peer was lost before its share
        arrived. counted: microbatches that the peers of this stage counted.
        """
        self.sum.begin(self.peer.stages[self.stages[self.me]], self._own())
        return self._mean(self.sum.result(), counted)

    def _mean(self, total: Tensor | None, counted: int) -> Tensor | None:
        if total is None or counted == self.microbatches:
            return total
        return total * (self.microbatches / counted)

    def _vote(self, gradient: Tensor | None) -> tuple[dict[int, PeerStats], list[int]]:
        """Agree on every peer's stats, once it has its gradient or has failed to get it; and on who may join."""
        own = len(self.peer.tally.counted)
        square = float(gradient.double().square().sum()) if gradient is not None and gradient.numel() else _NO_SQUARE
        seconds = round(1e9 * self.peer.counts.seconds / own) if own else 0
        clock = as_bits(self.peer.now())
        vote = PeerStats(
            int(gradient is not None),
            as_bits(square),
            own,
            seconds,
            self.peer.mean_queue(),
            clock,
            int(self.leaving),
            int(self.wants_states),
        )
        answers = self.agreement.agree([*vote, *self.asking])
        self.apply_placement()
        asked = self.admissible(peer for stats in answers.values() for peer in stats[len(vote) :])
        return {position: PeerStats(*stats[: len(vote)]) for position, stats in answers.items()}, asked

    def _conclude_step(self, votes: Mapping[int, PeerStats], loss: float, asked: Sequence[int]) -> SwarmStep:
        means = self._squares({position: as_number(vote.square) for position, vote in votes.items()})
        self.peer.counts.seconds = 0.0
        self.placement.measured(votes)
        members, self.saves = self.agreement.members, any(vote.saves for vote in votes.values())
        clock = as_number(votes[members[0]].clock)
        self._next = self._changes(clock, {peer for peer in members if votes[peer].leaves}, votes, asked)
        own = means[self.stages[self.me]]
        return SwarmStep(loss, sum(means) ** 0.5, own**0.5, members, votes)

    def _squares(self, votes: Mapping[int, float]) -> list[float]:
        """By stage, the mean of its peers' square norms, 0 if none has a gradient. votes: square norms by position."""
        squares = [[votes[position] for position in self.peers(stage)] for stage in range(self.count)]
        known = [[square for square in each if square != _NO_SQUARE] for each in squares]
        return [sum(each) / len(each) if each else 0.0 for each in known]

    def _changes(
        self, clock: float, leavers: set[int], stats: Mapping[int, PeerStats], asking: Sequence[int]
    ) -> list[StageChange]:
        """Changes before the next step. The last peer of a stage leaves only after another one has moved there."""
        self._going = self._may_go(sorted(leavers))
        staying = [peer for peer in self.agreement.members if peer not in leavers]
        changes = self.placement.change(clock, staying, stats, asking) if staying else []
        last = {self.stages[peer] for peer in leavers.difference(self._going)}
        bare = sorted(last - {change.after for change in changes})
        moving = {change.peer for change in changes}
        changes += self.placement.rescue([peer for peer in staying if peer not in moving], (), bare)
        self.bare = last - {change.after for change in changes}
        self.is_needed = self.me in leavers and self.stages[self.me] in self.bare
        return changes

    def _may_go(self, leavers: Sequence[int]) -> list[int]:
        """Those of `leavers` that may leave now: not the last peer of a stage."""
        going: list[int] = []
        for peer in leavers:
            stage = self.stages[peer]
            if set(self.peers(stage)) - {*going, peer}:
                going.append(peer)
        return going

    @property
    def has_departed(self) -> bool:
        return self.me not in self.agreement.members

    def lacks(self, settled: Collection[int]) -> bool:
        """Whether the step lacks the part of a peer that was lost after the votes `settled`."""
        return False  # the sums include it

    def _own(self) -> Tensor:
        """This peer's accumulated gradients, flat (n,)."""
        return torch.cat([_gradient(parameter).reshape(-1) for parameter in self.parameters]).cpu()

    @torch.no_grad()
    def _take_over(self, gradient: Tensor | None) -> None:
        """Write `gradient` (n,) into the parameters' `.grad`; None or empty clears them."""
        begin = 0
        for parameter in self.parameters:
            parameter.grad = None
            if gradient is not None and gradient.numel():
                part = gradient[begin : begin + parameter.numel()].view(parameter.shape)
                parameter.grad = part.to(parameter.device)
            begin += parameter.numel()


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
