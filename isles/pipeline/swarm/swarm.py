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

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from isles.comm.errors import CommError, DeadlinePassed
from isles.pipeline.swarm.agreement import Agreement
from isles.pipeline.swarm.books import as_words, fixes, from_words, lacking
from isles.pipeline.swarm.peer import SwarmPeer
from isles.pipeline.swarm.reduction import stage_sum

Consistency = Literal["exact", "strict", "relaxed"]


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


@dataclass(frozen=True, slots=True)
class PeerTold:
    """Of one peer in a step: the seconds that it computed for a microbatch, 0 where it had none, and its mean queue."""

    seconds: float
    queue: float
    counted: int


@dataclass(frozen=True, slots=True)
class SwarmStep:
    """What all peers know of a step that counts. loss: mean of the microbatches, nats; norm: of the whole gradient."""

    loss: float
    norm: float
    members: tuple[int, ...]
    told: Mapping[int, PeerTold]


class Swarm:
    """The steps of one peer. stages: by position, which stage it serves; the same at all of them.

    parameters: of this peer's stage, whose `.grad` a step leaves as the mean over the step's microbatches: of the stage
    with `sums`, else of those that this peer has counted (None where it has none).
    """

    def __init__(
        self,
        peer: SwarmPeer,
        agreement: Agreement,
        parameters: Sequence[nn.Parameter],
        stages: Sequence[int],
        microbatches: int,
        *,
        consistency: Consistency = "exact",
        sums: bool = True,
    ) -> None:
        self.peer, self.agreement, self.parameters = peer, agreement, list(parameters)
        self.stages, self.count = list(stages), max(stages) + 1
        self.microbatches, self.consistency, self.sums = microbatches, consistency, sums
        self.told: Mapping[int, PeerTold] = {}
        self._place()

    @property
    def me(self) -> int:
        return self.agreement.me

    def peers(self, stage: int) -> list[int]:
        """Positions of those of `stage` that are left."""
        return [position for position in self.agreement.members if self.stages[position] == stage]

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
            self.peer.counts.repeated += 1

    def _begin(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.peer.forget()
        self._place()

    def _place(self) -> None:
        stages = [self.peers(stage) for stage in range(self.count)]
        for stage, peers in enumerate(stages):
            if not peers:
                raise StageLost(stage)
        self.peer.place(stages, self.stages[self.me])

    def _mine(self, todo: Sequence[int]) -> list[int]:
        """The microbatches that begin here, by the origins' speeds."""
        if self.stages[self.me]:
            return []
        return origins(todo, {peer: self._seconds(peer) for peer in self.peers(0)})[self.me]

    def _seconds(self, peer: int) -> float:
        known = {
            position: told.seconds for position, told in self.told.items() if told.seconds and position in self.peers(0)
        }
        return known.get(peer, sum(known.values()) / len(known) if known else 1.0)

    # Settling

    def _strict(self, whole: bool) -> SwarmStep | None:
        before = self.agreement.members
        said = self.agreement.agree([*self._counted(), int(whole)])
        self._place()
        if self.agreement.members != before or not all(word[2] for word in said.values()):
            return None
        return self._conclude(said)

    def _settle(self) -> SwarmStep:
        while True:
            book = as_words(set(self.peer.counted), self.microbatches)
            said = self.agreement.agree([*self._counted(), *book])
            self._place()
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
        return [len(self.peer.counted), _bits(float(sum(loss.double() for loss in self.peer.losses_counted())))]

    def _conclude(self, settled: Mapping[int, Sequence[int]]) -> SwarmStep | None:
        """The step's gradients, once all who are left have them. settled: what all said when the books were right."""
        own = len(self.peer.counted)
        last, here = (
            [settled[position] for position in self.peers(at)] for at in (-1 % self.count, self.stages[self.me])
        )
        loss = sum(_number(word[1]) for word in last) / sum(word[0] for word in last)
        total: Tensor | None = None
        if self.sums:
            total = self._sum()
            holds, factor = total is not None, self.microbatches / sum(word[0] for word in here)
            if total is not None and factor != 1.0:
                total *= factor
        else:
            holds, factor = True, self.microbatches / own if own else 1.0
        square = self._square(total, factor)
        seconds = round(1e9 * self.peer.counts.seconds / own) if own else 0
        word = _Word(int(holds), _bits(square), own, seconds, self.peer.mean_queue())
        said = {position: _Word(*told) for position, told in self.agreement.agree(word).items()}
        self._place()
        if not all(told.holds for told in said.values()):
            return None
        self._take_over(total, factor, own)
        return self._told(said, loss)

    def _told(self, said: Mapping[int, _Word], loss: float) -> SwarmStep:
        squares = [[_number(said[position].square) for position in self.peers(stage)] for stage in range(self.count)]
        norm = sum(sum(known) / len(known) for known in squares) ** 0.5
        self.told = {
            position: PeerTold(word.nanoseconds / 1e9, word.queue / 1000, word.counted)
            for position, word in said.items()
        }
        self.peer.counts.seconds = 0.0
        return SwarmStep(loss, norm, self.agreement.members, self.told)

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

    def _square(self, total: Tensor | None, factor: float) -> float:
        """Of the 2-norm of this stage's gradient."""
        if self.sums:
            return 0.0 if total is None else float(total.double().square().sum())
        known = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return factor**2 * float(torch.stack([own.double().square().sum() for own in known]).sum()) if known else 0.0

    @torch.no_grad()
    def _take_over(self, total: Tensor | None, factor: float, own: int) -> None:
        if total is None:
            if own and factor != 1.0:
                torch._foreach_mul_([each.grad for each in self.parameters if each.grad is not None], factor)
            return
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


def _bits(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]


def _number(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]
