"""A peer of a swarm as a `StepRunner`: microbatches by number, the swarm's step, and the gathered model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from isles.comm.collectives.message_queue import MessageQueue
from isles.comm.errors import Malformed, PeerLost
from isles.comm.group import same_text
from isles.comm.mesh import Mesh
from isles.models import limits, sketch
from isles.models.stages import Stage
from isles.network.routing.events import Span
from isles.pipeline.boundaries.scheme import Scheme
from isles.pipeline.compute import Context, StageShares, stage_shares
from isles.pipeline.config import PipelineConfig
from isles.pipeline.peers.agreement import Agreement
from isles.pipeline.peers.inbox import LARGE, PeerInbox, message_lengths
from isles.pipeline.pipeline import Cut, form_of
from isles.pipeline.recovery import gradient_norm, refuse_unequal
from isles.pipeline.swarm.delayed import DelayedSwarm
from isles.pipeline.swarm.evaluation import SwarmEvaluator, gathered, state_bytes
from isles.pipeline.swarm.outer import OwnSwarm
from isles.pipeline.swarm.peer import StageWork, SwarmPeer
from isles.pipeline.swarm.placement import NOWHERE, Rebalancer, StageChange, StagePlacement
from isles.pipeline.swarm.stage_recovery import (
    StageStateServer,
    enter,
    fetch_neighbour_states,
    fetch_state,
    rebuild,
    welcome,
)
from isles.pipeline.swarm.swarm import StageLost, Swarm, SwarmStep
from isles.pipeline.wire import StageForm
from isles.replicas.start import same_weights, spread_from_first
from isles.replicas.sync import ReplicaSync
from isles.training.config.reading import for_members
from isles.training.config.sections import Config
from isles.training.stage_runner import on_host
from isles.training.step import Left, Text
from isles.training.worker import PartsMaker

_AHEAD = 3
"""`in_flight = "auto"`: microbatches in flight per peer; the origins share them."""


NewStage = tuple[Stage, Scheme, Text | None]
"""A stage, its boundary scheme, and its text if it is the first."""


class Swarmed:
    """One peer of a swarm.

    parts: of its trainer, with the first stage that it serves, its boundary scheme, and its text (None if the stage is
    not the first). present: ranks that take part from the start. met: ranks that it receives from at the start; None:
    all.

    last: the agreed results of the last step; step: its number. moves, rebuilt: number of stages that this peer moved
    to, and of those that it rebuilt. tokens: read here for microbatches that this peer has counted. block_norm: of the
    last gradient of this stage's blocks.
    """

    reads = False
    played: Sequence[Span] = ()
    owner: Any
    """The trainer, with `state_bytes`: this peer's state between two steps, for new peers of its stage; `become`: serve
    another stage from such a state; `revive`: serve a stage that has no peer left, from its neighbours' states.
    """

    def __init__(
        self,
        parts: PartsMaker,
        cut: Cut,
        scheme: Scheme,
        *,
        present: Sequence[int],
        met: Sequence[int] | None = None,
    ) -> None:
        config = parts.config
        self.config, self.world, self.cut = config, parts.world, cut
        self.stage, self.scheme, self.text = cast(Stage, parts.optimizer.model), scheme, parts.text
        self.rebuilds = config.pipeline.swarm.stage_lost == "rebuild"
        if self.rebuilds:
            refuse_unequal([len(piece.blocks) for piece in cut.pieces], 'pipeline.swarm.stage_lost = "rebuild"')
        self.rows = config.data.batch_size_per_worker(1)
        inbox = self._inbox(met)
        self._transfers = StageStateServer(inbox, lambda: self.owner.state_bytes())
        self.swarm = self._swarm(inbox, present, parts.autocast)
        self._evaluate = SwarmEvaluator(self.swarm)
        self.step = self.tokens = self.moves = self.rebuilt = 0
        self.block_norm = 0.0
        self.last: SwarmStep | None = None
        self._is_arranged = self._has_declined = False

    def _inbox(self, met: Sequence[int] | None) -> PeerInbox:
        """The inbox for messages between all ranks, including those of peers that join later."""
        config, world = self.config, self.world
        largest = max(state_bytes(self._sketch(), piece) for piece in self.cut.pieces)
        lengths = message_lengths(
            self._form(),
            gradient=largest,
            state=largest,
            peers=min(world.size, config.world.elastic.max_members),
            microbatches=config.pipeline.microbatches,
            ever=world.size,
        )
        group, run = world.world.among(range(world.size), "pipeline"), identity_hash(identity(config, self.cut))
        return PeerInbox(MessageQueue(group, run=run, lengths=lengths, channels=LARGE, met=met))

    def _swarm(self, inbox: PeerInbox, present: Sequence[int], autocast: Context) -> Swarm:
        """The swarm at the start; this worker is a member if it is `present`."""
        config, world, pipeline, group = self.config, self.world, self.config.pipeline, inbox.queue.group
        work = StageWork(
            self.stage, group, self._form(), pipeline.microbatches, shares=self._shares(), autocast=autocast
        )
        work.text = self._microbatch
        placed = [coordinate.stage for coordinate in world.layout.coordinates]
        stages = [stage if rank in present else NOWHERE for rank, stage in enumerate(placed)]
        agreement = Agreement(inbox, group.deadlines.pipeline, present if world.rank in present else ())
        seed, room = config.run.seed * world.size + world.rank, origin_room(pipeline, stages)
        peer, settings = SwarmPeer(work, agreement, pipeline, room, seed), pipeline.swarm
        balance = Rebalancer(
            settings.rebalance, stage_costs(self.cut), period=settings.rebalance_every, hysteresis=settings.hysteresis
        )
        late = DelayedSwarm if settings.delay_updates else Swarm
        kind = late if config.method == "none" else OwnSwarm
        return kind(peer, self._trained(), StagePlacement(stages, balance))

    def enter(self, others: Sequence[int], wish: int = NOWHERE) -> int:
        """Join the running swarm of `others`; returns this peer's first step. wish: the stage that it wants to serve.
        Left if all of them are lost.
        """
        try:
            step, change = enter(self.swarm, others, wish)
        except PeerLost:
            raise Left from None
        if step > self.config.run.steps:
            raise Malformed(-1, f"a welcome to step {step}, beyond the end of this run")
        here = [self.swarm.stages[peer] for peer in self.swarm.agreement.members]
        self.swarm.peer.room = origin_room(self.config.pipeline, here)
        self._move(change)
        self.step, self._is_arranged = step - 1, True
        return step

    @property
    def norm(self) -> float:
        """Norm of the last step's gradient: over all stages, or with pipeline.clip = "stage" of this stage."""
        assert self.last is not None
        return self.last.norm if self.config.pipeline.clip == "model" else self.last.stage_norm

    def run(self, batches: Iterable[Tensor]) -> Tensor | None:
        self.step += 1
        self._take_up(self._arrange())
        self._transfers.open()
        self.swarm.number = self.step
        self.last = self.swarm.step(self._rebuild if self.rebuilds else None)
        self._report_lost()
        if isinstance(self.swarm, OwnSwarm):
            self._transfers.close()  # until the exchange has landed: the weights are between two valid states
        self.block_norm = gradient_norm(self.stage)
        if self.swarm.is_needed and not self._has_declined:
            self._decline()
        if self.swarm.stages[self.swarm.me] == 0:
            form = self.swarm.peer.work.form
            self.tokens += len(self.swarm.peer.tally.counted) * form.sequences * form.length
        return torch.tensor(self.last.loss, device=next(self.stage.parameters()).device, dtype=torch.float32)

    def take_last(self) -> bool:
        """Put the last step's gradient into the parameters if its update is pending; returns whether it is."""
        if not isinstance(self.swarm, DelayedSwarm):
            return False
        assert self.last is not None
        norm, stage_norm = self.swarm.take_last()
        self.last = replace(self.last, norm=norm, stage_norm=stage_norm)
        return True

    def _decline(self) -> None:
        """Report that this peer cannot leave, as its stage would have no peer; the launcher may then stop the run."""
        self._has_declined = True
        stage = self.swarm.stages[self.swarm.me]
        notice = f"worker {self.swarm.me} is asked to leave, but is the last of stage {stage}"
        self.world.report({"notice": f"{notice}, with no peer to take its place"})
        self.world.leaving.decline()

    def _arrange(self) -> list[StageChange]:
        if self._is_arranged:  # it has just joined
            self._is_arranged = False
            return []
        changes = self.swarm.arrange()
        if self.swarm.has_departed:
            raise Left
        welcome(self.swarm, self.step)
        return changes

    def gauges(self) -> dict[str, float]:
        counts = asdict(self.swarm.peer.counts)
        totals = {name: count for name, count in counts.items() if name != "seconds"}
        own = {"stage": self.swarm.stages[self.swarm.me], "moves": self.moves}
        own |= {"rebuilt": self.rebuilt} if self.rebuilds else {}
        return totals | own | {"peers": len(self.swarm.agreement.members)}

    def state_dict(self) -> dict[str, Any] | None:
        own = {"step": self.step, "tokens": self.tokens, "moves": self.moves, "norm": self.block_norm}
        return own | {"stages": list(self.swarm.stages), "swarm": self.swarm.state_dict()}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        assert state is not None
        self.step, self.tokens, self.moves = state["step"], state["tokens"], state["moves"]
        self.block_norm = state["norm"]
        self.swarm.load_state_dict(state["swarm"])

    def evaluate(self, batches: Callable[[], Iterable[Tensor]]) -> float | None:
        loss = self._evaluate.loss(batches, self._between)
        return loss if self.swarm.me == self.swarm.peers(0)[0] else None

    def whole(self, optimizer: ReplicaSync) -> nn.Module | None:
        optimizer.consolidate()  # the mean over the peers of a stage, if their weights differ
        whole = self._sketch()
        if self.text is not None:
            whole = on_host(self.config.model, self.config.run.seed)
            self.scheme.fit(whole)
        return self.scheme.unsplit(whole) if gathered(self.swarm, whole, self.cut.pieces, self._between) else None

    @property
    def _between(self) -> Callable[[], None] | None:
        """The callback that rebuilds stages lost between two steps, when no peer can join."""
        return partial(self._rebuild, comers=False) if self.rebuilds else None

    def _rebuild(self, *, comers: bool = True) -> None:
        """Assign peers to the stages that have lost all of theirs."""
        changes = rebuild(self.swarm, self.step, self.config.pipeline.swarm.stage_patience, comers=comers)
        self._take_up(changes, " and rebuilds it from its neighbours, as it had no peer left")

    def _take_up(self, changes: Iterable[StageChange], more: str = "") -> None:
        """Apply this peer's own change; the first member reports all changes."""
        for change in changes:
            if change.peer == self.swarm.me:
                self._move(change)
            if self.swarm.me == self.swarm.agreement.members[0]:
                move = "joins" if change.before == NOWHERE else f"moves from stage {change.before} to"
                notice = f"worker {change.peer} {move} stage {change.after} before step {self.step}{more}"
                self.world.report({"notice": notice})

    def _move(self, change: StageChange) -> None:
        """Copy the new stage's state from a donor; if there is none, rebuild it from its neighbours."""
        donors, agreement = self.swarm.donors, self.swarm.agreement
        if donors:
            state = fetch_state(agreement.inbox, donors, agreement.patience)
            if state is None:
                raise StageLost(change.after)
            self.serve(*self.owner.become(change.after, state))
        else:
            self.serve(*self.owner.revive(change.after, fetch_neighbour_states(self.swarm, change.after)))
            self.rebuilt += 1
        self.moves += 1

    def serve(self, stage: Stage, scheme: Scheme, text: Text | None) -> None:
        self.stage, self.scheme, self.text = stage, scheme, text
        self.swarm.peer.work.hold(stage, self._form())
        self.swarm.peer.work.shares = self._shares()
        self.swarm.parameters = self._trained()

    def _report_lost(self) -> None:
        agreement = self.swarm.agreement
        missed, agreement.missed = agreement.missed, []
        for peer in missed if self.swarm.me == agreement.members[0] else ():
            notice = f"worker {peer} of stage {self.swarm.stages[peer]} was lost by step {self.step}"
            self.world.report({"notice": f"{notice}; the others go on without it"})

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
        """The text of microbatch `number`, by seed, step and number only, so any origin can run it."""
        assert self.text is not None
        sequences = self.swarm.peer.work.form.sequences
        first = (self.swarm.number - 1) * self.rows + number * sequences
        return self.text.read(np.arange(first, first + sequences))


def identity(config: Config, cut: Cut) -> str:
    """The settings that must be equal at all peers, as text: `of_all`, and the cut."""
    return of_all(config) + repr([piece.blocks.start for piece in cut.pieces])


def of_all(config: Config) -> str:
    """The configuration without each machine's own settings, as text; data is compared elsewhere, by its tokens."""
    own, model = config.data, config.model
    path, held = (dict.fromkeys(x, "-") if isinstance(x, dict) else "" for x in (own.path, own.validation_path))
    data = replace(own, path=path, validation_path=held, cache="", tokenizer="bytes", vocab=0, ids_dtype="uint16")
    model, world = replace(model, device="auto", hf=model.hf and "-"), replace(config.world, threads=1)
    return for_members(replace(config, data=data, model=model, world=world))


def identity_hash(identity: str) -> int:
    """56 bits of the hash of `identity`, for the headers of messages."""
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:7], "little")


def begin_alike(config: Config, world: Mesh, cut: Cut, stage: Stage, present: Sequence[int]) -> None:
    """Check that all present ranks have the same configuration, and copy the weights of each stage's first peer to the
    others. Diverged, naming the different one, otherwise. Call it before an optimizer is created: it may save the
    initial weights.
    """
    stages = [coordinate.stage for coordinate in world.layout.coordinates]
    alike = [rank for rank in present if stages[rank] == stages[world.rank]]
    everyone, peers = world.world.among(present), world.world.among(alike, "control")
    hint = "its configuration or its cut points differ; start all peers with the same ones"
    same_text(everyone, identity(config, cut), hint)
    with torch.no_grad():
        spread_from_first(peers, [*stage.parameters(), *stage.buffers()])
    same_weights(peers, dict(stage.named_parameters()))


def stage_costs(cut: Cut) -> list[float]:
    """Cost of a sample at each stage, in the unit of `cut.costs`."""
    blocks = [sum(cut.costs.blocks[number] for number in piece.blocks) for piece in cut.pieces]
    return [own + (cut.costs.head if piece.leaves else 0.0) for own, piece in zip(blocks, cut.pieces, strict=True)]


def origin_room(pipeline: PipelineConfig, stages: Sequence[int]) -> int | None:
    """The most microbatches that an origin has in flight; None: no limit. stages: by peer, `NOWHERE` if absent."""
    in_flight, origins = pipeline.in_flight, max(stages.count(0), 1)
    here = sum(stage != NOWHERE for stage in stages)
    room = {"auto": -(-_AHEAD * here // origins), "1f1b": max(stages, default=0) + 1, "all": None}
    return in_flight if isinstance(in_flight, int) else room[in_flight]
