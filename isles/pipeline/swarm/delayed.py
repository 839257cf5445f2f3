"""A swarm that sums a step's gradients while the next step's microbatches run.

    step t       microbatches run on the weights after t - 2 updates; the peers settle
                 the sum of step t - 1, which ran meanwhile, is awaited; all agree that all have it
                 the sum of step t begins; update t - 1 is applied
    at the end   the last sum is awaited (`close`), and the last update applied

    theta_t = update(theta_(t-1), gradient of step t at theta_(t-2)),  theta_(-1) = theta_0

After SWARM's delayed parameter updates (arXiv 2301.11913) and ZeRO-Offload's. If a peer is lost before its share of a
sum arrives, the others return to that step, with its weights and ledgers: they run again what the lost peer had
counted, and sum at once. So the guarantee of `Swarm` holds for these updates.

Memory: the ledger, the gradients and the weights of one more step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from isles.pipeline.peers.inbox import as_number
from isles.pipeline.swarm.peer import StepTally
from isles.pipeline.swarm.placement import StageChange
from isles.pipeline.swarm.swarm import Swarm, SwarmStep, Votes


@dataclass(slots=True)
class _PastStep:
    """A step whose microbatches are done. weights: those that they ran on; gradients: of the microbatches in `tally`.
    shared: microbatches counted by this stage's peers, for the sum in flight; is_whole: whether no peer was lost
    between the votes on them and the sum.
    """

    number: int
    tally: StepTally
    gradients: list[Tensor | None]
    weights: list[Tensor]
    shared: int = 0
    is_whole: bool = False


class DelayedSwarm(Swarm):
    """A step leaves the gradient of the one before in the parameters; the first one leaves none."""

    _open: _PastStep | None = None

    @override
    def arrange(self) -> list[StageChange]:
        """Complete the sum in flight before a change: it needs the shares of leaving peers, and new ones have none."""
        if self._next or self._going:
            self.close()
        return super().arrange()

    @override
    def close(self) -> None:
        if self._open is None:
            return
        self.late = self._awaited(self._open)
        votes = self.agreement.agree([int(self.late is not None)])
        self.apply_placement()
        if not all(vote[0] for vote in votes.values()):
            self.late = self._made_again(self._open)
        self._open = None

    def take_last(self) -> tuple[float, float]:
        """At the end: leave the last step's gradient in the parameters. Returns its norm over all stages, and over this
        one.
        """
        self.close()
        votes, _ = self._vote(self.late)
        means = self._squares({position: as_number(vote.square) for position, vote in votes.items()})
        self._take_over(self.late)
        self.late = None
        return sum(means) ** 0.5, means[self.stages[self.me]] ** 0.5

    @override
    def _conclude(self, settled: Votes) -> SwarmStep | None:
        before = self._open
        gradient = self._late_or_none() if before is None else self._awaited(before)
        votes, asked = self._vote(gradient)
        if before is not None and not all(stats.holds for stats in votes.values()):
            gradient = self._made_again(before)
            votes, _ = self._vote(gradient)
        self._open, self.late = self._past(), None
        self._open.shared = self._counted_here(settled)
        self._open.is_whole = len(settled) == len(self.agreement.members)
        self.sum.begin(self.peer.stages[self.stages[self.me]], self._own())
        self._take_over(gradient)
        return self._conclude_step(votes, self._loss(settled), asked)

    def _late_or_none(self) -> Tensor:
        return torch.empty(0, dtype=torch.float32, device="cpu") if self.late is None else self.late

    def _awaited(self, step: _PastStep) -> Tensor | None:
        """The mean gradient of `step`; None if a share of it is lost."""
        return self._mean(self.sum.result(), step.shared) if step.is_whole else None

    def _made_again(self, step: _PastStep) -> Tensor:
        """The mean gradient of a step that has lost a share, computed again by the remaining peers."""
        with self._back_in(step):
            is_whole = True
            while True:
                if self.consistency == "strict":
                    self._begin()
                    is_whole = self.peer.run(self._mine(range(self.microbatches)))
                settled = self._settled(is_whole)
                if settled is None:
                    continue
                gradient = self._gradient(self._counted_here(settled))
                votes = self.agreement.agree([int(gradient is not None)])
                self.apply_placement()
                if gradient is not None and all(vote[0] for vote in votes.values()):
                    return gradient

    def _past(self) -> _PastStep:
        gradients = [parameter.grad for parameter in self.parameters]
        weights = [parameter.detach().clone() for parameter in self.parameters]
        return _PastStep(self.number, self.peer.tally, gradients, weights)

    @contextmanager
    def _back_in(self, past: _PastStep) -> Iterator[None]:
        now = self._past()
        self._go_to(past)
        try:
            yield
        finally:
            self._go_to(now)

    @torch.no_grad()
    def _go_to(self, step: _PastStep) -> None:
        self.number = step.number
        self.peer.tally = step.tally
        for parameter, gradient, weights in zip(self.parameters, step.gradients, step.weights, strict=True):
            parameter.grad = gradient
            parameter.copy_(weights)
