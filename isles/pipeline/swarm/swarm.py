"""A step of a swarm: microbatches find their way, then all settle what came of it, then it counts.

    run      microbatches travel (`isles.pipeline.swarm.peer`)
    settle   all who are left agree on who that is and on what each has counted, and mend what is wrong
    sum      the gradients of a stage over its peers, in the order of positions
    verdict  all agree that all have the sum: only then does anybody take the step. Else settle again

Guarantee, by `consistency`, whoever is lost and whenever, as long as every stage keeps a peer:

    exact     the gradient of every stage is that of the same microbatches, each counted once: what one process
              accumulates, up to the order of its sums. What a lost peer had counted is run again from its neighbours'
              books, and what was counted twice is taken back: a loss costs about what was lost
    strict    the same gradient without books: where somebody is lost the step begins again without it. Nobody is asked
              twice, so a peer that hangs ends the run by name
    relaxed   as in SWARM (arXiv 2301.11913): what a stage lacks is run again, and counts again wherever it was counted
              before; a stage divides by its own count, which is at least the microbatches of the step

Without a loss, and with every answer in time, all three are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from isles.comm.errors import CommError, DeadlinePassed
from isles.pipeline.config import Consistency
from isles.pipeline.swarm.agreement import Agreement
from isles.pipeline.swarm.arrangement import NOWHERE, Arrangement, PeerTold, StageChange
from isles.pipeline.swarm.books import as_words, fixes, from_words, lacking
from isles.pipeline.swarm.peer import SwarmPeer
from isles.pipeline.swarm.post import ASK, as_bits, as_number
from isles.pipeline.swarm.reduction import stage_sum


class StageLost(CommError):
    """No peer of `stage` is left: nobody has its weights."""

    def __init__(self, stage: int) -> None:
        super().__init__(f"stage {stage} has no peer left")
        self.stage = stage

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.stage,)


class _Word(NamedTuple):
    """What a peer says in a verdict. Floats as the bits of a double."""

    holds: int
    square: int
    counted: int
    nanoseconds: int
    queue: int
    clock: int
    leaves: int


@dataclass(frozen=True, slots=True)
class SwarmStep:
    """What all peers know of a step that counts. loss: mean of the microbatches, nats; norm: of the whole gradient;
    stage_norm: of this stage's.
    """

    loss: float
    norm: float
    stage_norm: float
    members: tuple[int, ...]
    told: Mapping[int, PeerTold]


class Swarm:
    """The steps of one peer. arrangement: the same at all of them.

    parameters: of this peer's stage, whose `.grad` a step leaves as the mean over the step's microbatches.
    """

    def __init__(
        self,
        peer: SwarmPeer,
        agreement: Agreement,
        parameters: Sequence[nn.Parameter],
        arrangement: Arrangement,
        microbatches: int,
        *,
        consistency: Consistency = "exact",
    ) -> None:
        self.peer, self.agreement, self.parameters = peer, agreement, list(parameters)
        self.arrangement, self.count = arrangement, len(arrangement.costs)
        self.microbatches, self.consistency = microbatches, consistency
        self.changes: list[StageChange] = []
        """Of the last `arrange`."""
        self._next: list[StageChange] = []
        self.leaving = False
        """Whether this peer asks to go: after a step, while its stage keeps another one."""
        self._going: list[int] = []
        self._asking: set[int] = set()
        agreement.post.answers[ASK] = lambda letter: self._asking.add(letter.sender)
        if self.stages[self.me] != NOWHERE:
            self.place()

    @property
    def me(self) -> int:
        return self.agreement.me

    @property
    def stages(self) -> list[int]:
        """By position, which stage it serves."""
        return self.arrangement.stages

    def peers(self, stage: int) -> list[int]:
        """Positions of those of `stage` that are left."""
        return [position for position in self.agreement.members if self.stages[position] == stage]

    def arrange(self) -> list[StageChange]:
        """Before a step: who comes, goes or changes its stage does so now. All know of the same ones."""
        changes, self._next = self._next, []
        going, self._going = self._going, []
        self.agreement.let_go(going)
        self.changes = [
            change for change in changes if change.before == NOWHERE or change.peer in self.agreement.members
        ]
        self.arrangement.apply(self.changes)
        comers = [change.peer for change in self.changes if change.before == NOWHERE]
        self.agreement.members = tuple(sorted({*self.agreement.members, *comers}))
        self._asking -= set(comers)
        return self.changes

    @property
    def donors(self) -> list[int]:
        """Those of this peer's stage that have its state."""
        fresh = {change.peer for change in self.changes}
        return [peer for peer in self.peers(self.stages[self.me]) if peer not in fresh]

    def step(self) -> SwarmStep:
        """One step. StageLost where a stage has no peer any more; PeerLost where the others do not count this one any
        more; DeadlinePassed where somebody is silent who is not known to be lost.
        """
        todo = range(self.microbatches)
        while True:
            self._begin()
            whole = self.peer.run(self._mine(todo))
            done = self._strict(whole) if self.consistency == "strict" else self._settle()
            if done is not None:
                return done
            self.peer.counts.begun_again += 1

    def _begin(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.peer.forget()
        self.place()

    def place(self) -> None:
        """Take note of who is left. StageLost where a stage has no peer any more."""
        stages = [self.peers(stage) for stage in range(self.count)]
        for stage, peers in enumerate(stages):
            if not peers:
                raise StageLost(stage)
        self.peer.place(stages, self.stages[self.me])

    def _mine(self, todo: Sequence[int]) -> list[int]:
        """The microbatches that begin here, by the origins' speeds."""
        if self.stages[self.me]:
            return []
        return origins(todo, {peer: self.arrangement.cost(peer) for peer in self.peers(0)})[self.me]

    # Settling

    def _strict(self, whole: bool) -> SwarmStep | None:
        before = self.agreement.members
        said = self.agreement.agree([*self._counted(), int(whole)])
        self.place()
        if self.agreement.members != before or not all(word[2] for word in said.values()):
            return None
        return self._conclude(said)

    def _settle(self) -> SwarmStep:
        while True:
            book = as_words(set(self.peer.counted), self.microbatches)
            said = self.agreement.agree([*self._counted(), *book])
            self.place()
            books = {position: from_words(word[2:], self.microbatches) for position, word in said.items()}
            stages = self.peer.stages
            if self.consistency == "exact":
                found = fixes(books, stages, self.microbatches)
                if not found.none:
                    self.peer.repair(found)
                    continue
            elif todo := lacking(books, stages, self.microbatches):
                self.peer.run(self._mine(todo))
                continue
            done = self._conclude(said)
            if done is not None:
                return done

    def _counted(self) -> list[int]:
        """How many microbatches this peer has added to its gradients, and the sum of their losses."""
        return [len(self.peer.counted), as_bits(float(sum(loss.double() for loss in self.peer.losses_counted())))]

    def _conclude(self, settled: Mapping[int, Sequence[int]]) -> SwarmStep | None:
        """The step's gradients, once all who are left have them. settled: what all said when the books were right."""
        own = len(self.peer.counted)
        last, here = (
            [settled[position] for position in self.peers(at)] for at in (-1 % self.count, self.stages[self.me])
        )
        loss = sum(as_number(word[1]) for word in last) / sum(word[0] for word in last)
        total, factor = self._sum(), self.microbatches / sum(word[0] for word in here)
        if total is not None and factor != 1.0:
            total *= factor
        square = 0.0 if total is None else float(total.double().square().sum())
        seconds = round(1e9 * self.peer.counts.seconds / own) if own else 0
        asking = as_words(self._asking, len(self.stages))
        clock = as_bits(self.peer.now())
        word = _Word(
            int(total is not None),
            as_bits(square),
            own,
            seconds,
            self.peer.mean_queue(),
            clock,
            int(self.leaving),
        )
        answers = self.agreement.agree([*word, *asking])
        said = {position: _Word(*told[: len(word)]) for position, told in answers.items()}
        self.place()
        if total is None or not all(told.holds for told in said.values()):
            return None
        self._take_over(total)
        asked = {place for told in answers.values() for place in from_words(told[len(word) :], len(self.stages))}
        return self._told(said, loss, asked)

    def _told(self, said: Mapping[int, _Word], loss: float, asked: set[int]) -> SwarmStep:
        squares = [[as_number(said[position].square) for position in self.peers(stage)] for stage in range(self.count)]
        means = [sum(known) / len(known) for known in squares]
        told = {
            position: PeerTold(word.nanoseconds / 1e9, word.queue / 1000, word.counted)
            for position, word in said.items()
        }
        self.peer.counts.seconds = 0.0
        self.arrangement.measured(told)
        members = self.agreement.members
        clock = as_number(said[members[0]].clock)
        self._going = self._may_go([peer for peer in members if said[peer].leaves])
        staying = [peer for peer in members if peer not in self._going]
        self._next = self.arrangement.change(
            clock, staying, told, sorted(peer for peer in asked if self.stages[peer] == NOWHERE)
        )
        own = means[self.stages[self.me]]
        return SwarmStep(loss, sum(means) ** 0.5, own**0.5, members, told)

    def _may_go(self, leavers: Sequence[int]) -> list[int]:
        """Of those who want to, but for the last of a stage."""
        going: list[int] = []
        for peer in leavers:
            stage = self.stages[peer]
            if set(self.peers(stage)) - {*going, peer}:
                going.append(peer)
        return going

    @property
    def is_gone(self) -> bool:
        """Whether this peer has left."""
        return self.me not in self.agreement.members

    def _sum(self) -> Tensor | None:
        flat = torch.cat([_gradient(parameter).reshape(-1) for parameter in self.parameters]).cpu()
        return stage_sum(
            self.agreement.post, self.peer.stages[self.stages[self.me]], flat, lambda: self.agreement.lost, self._wait
        )

    def _wait(self, missing: set[int]) -> None:
        mail, now = self.agreement.post.mail, self.peer.now
        began = now()
        mail.wait(self.agreement.patience)
        if not mail.letters and now() - began >= self.agreement.patience:
            raise DeadlinePassed(mail.group.ranks[min(missing)], "pipeline", self.agreement.patience)

    @torch.no_grad()
    def _take_over(self, total: Tensor) -> None:
        begin = 0
        for parameter in self.parameters:
            part = total[begin : begin + parameter.numel()].view(parameter.shape)
            parameter.grad = part.to(parameter.device)
            begin += parameter.numel()


def origins(todo: Sequence[int], seconds: Mapping[int, float]) -> dict[int, list[int]]:
    """Who begins which of the microbatches `todo`, so that origins of such seconds a microbatch end together."""
    given: dict[int, list[int]] = {peer: [] for peer in sorted(seconds)}
    for microbatch in todo:
        peer = min(given, key=lambda peer: ((len(given[peer]) + 1) * seconds[peer], peer))
        given[peer].append(microbatch)
    return given


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
