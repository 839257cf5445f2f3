"""A peer of a swarm as a `Step`: text by number, a swarm's step, and the model put together by who is left."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isles.comm.collectives.mail import Mail
from isles.comm.collectives.same import same_text
from isles.comm.errors import PeerLost
from isles.comm.mesh import Mesh
from isles.models import limits, sketch
from isles.models.stages import Stage
from isles.network.routing.events import Span
from isles.pipeline.boundaries.scheme import Scheme
from isles.pipeline.config import PipelineConfig
from isles.pipeline.executor import Context
from isles.pipeline.pipeline import Cut, form_of
from isles.pipeline.shares import StageShares, stage_shares
from isles.pipeline.swarm.agreement import Agreement
from isles.pipeline.swarm.arrangement import NOWHERE, Arrangement, StageChange
from isles.pipeline.swarm.entering import enter, welcome
from isles.pipeline.swarm.gathering import gathered, state_bytes
from isles.pipeline.swarm.gifts import give, take
from isles.pipeline.swarm.judging import SwarmJudge
from isles.pipeline.swarm.peer import SwarmPeer, SwarmWays
from isles.pipeline.swarm.post import Post, letter_lengths
from isles.pipeline.swarm.rebalancer import Rebalancer
from isles.pipeline.swarm.stage_work import StageWork
from isles.pipeline.swarm.swarm import StageLost, Swarm, SwarmStep
from isles.pipeline.wire import StageForm
from isles.replicas.start import same_weights, spread_from_first
from isles.replicas.sync import ReplicaSync
from isles.training.config.reading import to_toml
from isles.training.config.sections import Config
from isles.training.staged import on_host
from isles.training.text import Text

_AHEAD = 3
"""Microbatches that an origin has under way for each peer of the longest way, where nothing else is said."""


class Left(Exception):
    """This peer has left the swarm, as it was asked to, or has come too late."""


class Swarmed:
    """One peer. present: who is there from the start; others come when they do. text: of an origin. become: makes this
    worker a peer of another stage, of a state that `state` made at another one, and gives that stage and its text.
    `last` is what all know of the newest step.
    """

    reads = False
    played: Sequence[Span] = ()

    def __init__(
        self,
        config: Config,
        world: Mesh,
        cut: Cut,
        scheme: Scheme,
        stage: Stage,
        text: Text | None,
        autocast: Context,
        *,
        present: Sequence[int],
        state: Callable[[], bytes],
        become: Callable[[int, Tensor], tuple[Stage, Scheme, Text | None]],
    ) -> None:
        self.config, self.world, self.cut = config, world, cut
        self.stage, self.scheme, self.text, self._become = stage, scheme, text, become
        pipeline, self.rows = config.pipeline, config.data.batch_size_per_worker(1)
        form = self._form()
        said = to_toml(config) + repr([piece.blocks.start for piece in cut.pieces])
        stages = [coordinate.stage for coordinate in world.layout.coordinates]
        if world.rank in present:
            self._begin(said, [rank for rank in present if stages[rank] == stages[world.rank]], present)
        run = int.from_bytes(hashlib.sha256(said.encode()).digest()[:7], "little")
        largest = max(state_bytes(self._sketch(), piece) for piece in cut.pieces)
        lengths = letter_lengths(
            form, gradient=largest, state=largest, peers=world.size, microbatches=pipeline.microbatches
        )
        group = world.world.among(range(world.size), "pipeline")
        post = Post(Mail(group, run=run, lengths=lengths))
        give(post, state)
        work = StageWork(stage, group, form, pipeline.microbatches, shares=self._shares(), autocast=autocast)
        work.text = self._microbatch
        stages = [stage if rank in present else NOWHERE for rank, stage in enumerate(stages)]
        is_here = world.rank in present
        agreement = Agreement(post, group.deadlines.pipeline, present if is_here else ())
        ways = ways_of(pipeline, stages, agreement.patience)
        peer = SwarmPeer(work, post, agreement, ways, seed=config.run.seed * world.size + world.rank)
        costs = stage_costs(cut)
        policy, period, margin = pipeline.rebalance, pipeline.rebalance_every, pipeline.hysteresis
        balance = None if policy == "none" else Rebalancer(policy, costs, period=period, hysteresis=margin)
        arrangement = Arrangement(stages, costs, balance)
        self.swarm = Swarm(
            peer, agreement, self._trained(), arrangement, pipeline.microbatches, consistency=pipeline.consistency
        )
        self._judge = SwarmJudge(self.swarm)
        self.step = self.tokens = self.moves = 0
        """Steps of the run; tokens read by this peer for what it has counted; stages that it came to."""
        self.last: SwarmStep | None = None
        self._is_arranged = False

    def _begin(self, said: str, alike: Sequence[int], present: Sequence[int]) -> None:
        """Diverged, naming the odd one, unless all who are there have one configuration, and peers of a stage the same
        weights; those are the first one's.
        """
        everyone, peers = self.world.world.among(present), self.world.world.among(alike, "control")
        same_text(everyone, said, "its configuration or its cut points differ; start all peers with the same ones")
        with torch.no_grad():
            spread_from_first(peers, [*self.stage.parameters(), *self.stage.buffers()])
        same_weights(peers, list(self.stage.parameters()))

    def enter(self) -> int:
        """Come to a swarm that is at work; the step that this peer begins with. Left where nobody is there any more, of
        those who came before: workers are numbered as they come.
        """
        try:
            step, change = enter(self.swarm, range(self.world.rank))
        except PeerLost:
            raise Left from None
        self._move(change)
        self.step, self._is_arranged = step - 1, True
        return step

    @property
    def norm(self) -> float:
        """Of the newest step's gradient: the whole one's, or with pipeline.clip = "stage" this stage's."""
        assert self.last is not None
        return self.last.norm if self.config.pipeline.clip == "model" else self.last.stage_norm

    def run(self, batches: Iterable[Tensor]) -> Tensor | None:
        self.step += 1
        for change in self._arrange():
            if change.peer == self.swarm.me:
                self._move(change)
            elif self.swarm.me == self.swarm.agreement.members[0]:
                self._tell(change)
        self.last = self.swarm.step()
        if self.swarm.stages[self.swarm.me] == 0:
            self.tokens += len(self.swarm.peer.counted) * self.swarm.peer.work.form.sequences * self._length
        return torch.tensor(self.last.loss, device=next(self.stage.parameters()).device)

    def _arrange(self) -> list[StageChange]:
        if self._is_arranged:  # it has just come
            self._is_arranged = False
            return []
        changes = self.swarm.arrange()
        if self.swarm.is_gone:
            raise Left
        welcome(self.swarm, self.step)
        return changes

    def gauges(self) -> dict[str, float]:
        """What a line of metrics tells of this peer."""
        counts = asdict(self.swarm.peer.counts)
        told = {name: count for name, count in counts.items() if name != "seconds"}
        own = {"stage": self.swarm.stages[self.swarm.me], "moves": self.moves}
        return told | own | {"peers": len(self.swarm.agreement.members)}

    def state_dict(self) -> dict[str, Any] | None:
        return {"step": self.step, "tokens": self.tokens, "stages": list(self.swarm.stages)}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        assert state is not None
        self.step, self.tokens = state["step"], state["tokens"]
        self.swarm.arrangement.stages[:] = state["stages"]
        self.swarm.place()

    def judge(self, batches: Iterable[Tensor]) -> float | None:
        loss = self._judge.loss(lambda: () if self.text is None else self.text.validation())
        return loss if self.swarm.me == self.swarm.peers(0)[0] else None

    def whole(self, optimizer: ReplicaSync) -> nn.Module | None:
        optimizer.finish()
        whole = self._sketch()
        if self.text is not None:
            whole = on_host(self.config.model, self.config.run.seed)
            self.scheme.fit(whole)
        return self.scheme.unsplit(whole) if gathered(self.swarm, whole, self.cut.pieces) else None

    def _move(self, change: StageChange) -> None:
        """Take over the state of the new stage from one that has it."""
        state = take(self.swarm.agreement.post, self.swarm.donors, self.swarm.agreement.patience)
        if state is None:
            raise StageLost(change.after)
        self.serve(*self._become(change.after, state))
        self.moves += 1

    def serve(self, stage: Stage, scheme: Scheme, text: Text | None) -> None:
        """This stage from now on."""
        self.stage, self.scheme, self.text = stage, scheme, text
        self.swarm.peer.work.serve(self.stage, self._form(), self._shares())
        self.swarm.parameters = self._trained()

    def _tell(self, change: StageChange) -> None:
        whence = "comes" if change.before == NOWHERE else f"goes from stage {change.before}"
        told = f"worker {change.peer} {whence} to stage {change.after} before step {self.step}"
        self.world.report({"notice": told})

    @property
    def _length(self) -> int:
        return self.swarm.peer.work.form.length

    def _form(self) -> StageForm:
        context, vocab = limits(self.config.model)
        pipeline = self.config.pipeline
        return form_of(self.stage, self.scheme, pipeline, batch_size=self.rows, context=context, vocab=vocab)

    def _shares(self) -> StageShares:
        return stage_shares(self.stage.piece, self.cut.costs, self.config.pipeline.microbatches, recompute=False)

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.stage.parameters() if parameter.requires_grad]

    def _sketch(self) -> nn.Module:
        whole = sketch(self.config.model)
        self.scheme.fit(whole)
        return whole

    def _microbatch(self, number: int) -> Tensor:
        """A function of the seed, the step and the number, so any origin can run it."""
        assert self.text is not None
        sequences = self.swarm.peer.work.form.sequences
        first = (self.step - 1) * self.rows + number * sequences
        return self.text.loader.read(np.arange(first, first + sequences))


def stage_costs(cut: Cut) -> list[float]:
    """What a sample costs at each stage."""
    blocks = [sum(cut.costs.blocks[number] for number in piece.blocks) for piece in cut.pieces]
    return [own + (cut.costs.head if piece.leaves else 0.0) for own, piece in zip(blocks, cut.pieces, strict=True)]


def ways_of(pipeline: PipelineConfig, stages: Sequence[int], patience: float) -> SwarmWays:
    """How microbatches travel. stages: by peer."""
    given, origins = pipeline.in_flight, stages.count(0)
    here = sum(stage != NOWHERE for stage in stages)
    room = {"auto": -(-_AHEAD * here // origins), "1f1b": max(stages) + 1, "all": None}
    return SwarmWays(
        room=given if isinstance(given, int) else room[given],
        forward=pipeline.forward_deadline,
        backward=pipeline.backward_deadline,
        chooses_again=pipeline.consistency != "strict",
        patience=patience,
        keeps=pipeline.consistency == "exact",
    )
