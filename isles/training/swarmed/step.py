"""A peer of a swarm as a `Step`: text by number, a swarm's step, and the model put together by who is left."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isles.comm.collectives.mail import Mail
from isles.comm.collectives.same import same_text
from isles.comm.mesh import Mesh
from isles.models import limits, sketch
from isles.models.stages import Stage
from isles.network.routing.events import Span
from isles.pipeline.boundaries.scheme import Scheme
from isles.pipeline.config import PipelineConfig
from isles.pipeline.executor import Context
from isles.pipeline.pipeline import Cut, form_of
from isles.pipeline.shares import stage_shares
from isles.pipeline.swarm.agreement import Agreement
from isles.pipeline.swarm.gathering import gathered, state_bytes
from isles.pipeline.swarm.judging import SwarmJudge
from isles.pipeline.swarm.peer import SwarmPeer, SwarmWays
from isles.pipeline.swarm.post import Post, letter_lengths
from isles.pipeline.swarm.stage_work import StageWork
from isles.pipeline.swarm.swarm import Swarm, SwarmStep
from isles.replicas.start import same_weights, spread_from_first
from isles.replicas.sync import ReplicaSync
from isles.training.config.reading import to_toml
from isles.training.config.sections import Config
from isles.training.staged import on_host
from isles.training.text import Text

_AHEAD = 3
"""Microbatches that an origin has under way for each peer of the longest way, where nothing else is said."""


class Swarmed:
    """One peer. text: of an origin. `last` is what all know of the newest step."""

    reads = False
    played: Sequence[Span] = ()

    def __init__(
        self, config: Config, world: Mesh, cut: Cut, scheme: Scheme, stage: Stage, text: Text | None, autocast: Context
    ) -> None:
        self.config, self.world, self.cut, self.scheme, self.stage = config, world, cut, scheme, stage
        self.text, self.autocast = text, autocast
        context, vocab = limits(config.model)
        pipeline, self.rows = config.pipeline, config.data.batch_size_per_worker(1)
        self.form = form_of(stage, scheme, pipeline, batch_size=self.rows, context=context, vocab=vocab)
        group = world.world.among(range(world.size), "pipeline")
        said = to_toml(config) + repr([piece.blocks.start for piece in cut.pieces])
        same_text(world.world, said, "its configuration or its cut points differ; start all peers with the same ones")
        with torch.no_grad():
            spread_from_first(world.outer, [*stage.parameters(), *stage.buffers()])
        same_weights(world.outer, list(stage.parameters()))
        run = int.from_bytes(hashlib.sha256(said.encode()).digest()[:7], "little")
        largest = max(state_bytes(self._sketch(), piece) for piece in cut.pieces)
        lengths = letter_lengths(
            self.form, gradient=largest, state=largest, peers=world.size, microbatches=pipeline.microbatches
        )
        post = Post(Mail(group, run=run, lengths=lengths))
        shares = stage_shares(stage.piece, cut.costs, pipeline.microbatches, recompute=False)
        work = StageWork(stage, group, self.form, pipeline.microbatches, shares=shares, autocast=autocast)
        work.text = self._microbatch
        stages = [coordinate.stage for coordinate in world.layout.coordinates]
        agreement = Agreement(post, group.deadlines.pipeline)
        ways = ways_of(pipeline, stages, agreement.patience)
        peer = SwarmPeer(work, post, agreement, ways, seed=config.run.seed * world.size + world.rank)
        trained = [parameter for parameter in stage.parameters() if parameter.requires_grad]
        self.swarm = Swarm(peer, agreement, trained, stages, pipeline.microbatches, consistency=pipeline.consistency)
        self.step = 0
        self.last: SwarmStep | None = None
        self.tokens = 0
        """Read by this peer for what it has counted."""
        self._judge = SwarmJudge(self.swarm)

    @property
    def norm(self) -> float:
        """Of the newest step's gradient: the whole one's, or with pipeline.clip = "stage" this stage's."""
        assert self.last is not None
        return self.last.norm if self.config.pipeline.clip == "model" else self.last.stage_norm

    def run(self, batches: Iterable[Tensor]) -> Tensor | None:
        self.step += 1
        self.last = self.swarm.step()
        if self.text is not None:
            self.tokens += len(self.swarm.peer.counted) * self.form.sequences * self.form.length
        return torch.tensor(self.last.loss, device=next(self.stage.parameters()).device)

    def gauges(self) -> dict[str, float]:
        """What a line of metrics tells of this peer."""
        counts = asdict(self.swarm.peer.counts)
        told = {name: count for name, count in counts.items() if name != "seconds"}
        return told | {"peers": len(self.swarm.agreement.members)}

    def state_dict(self) -> dict[str, Any] | None:
        return {"step": self.step, "tokens": self.tokens, "stages": self.swarm.stages}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        assert state is not None
        self.step, self.tokens = state["step"], state["tokens"]

    def judge(self, batches: Iterable[Tensor]) -> float | None:
        loss = self._judge.loss(lambda: () if self.text is None else self.text.validation())
        return loss if self.swarm.me == self.swarm.peers(0)[0] else None

    def whole(self, optimizer: ReplicaSync) -> nn.Module | None:
        optimizer.finish()
        model = self.config.model
        whole = self._sketch()
        if self.text is not None:
            whole = on_host(model, self.config.run.seed)
            self.scheme.fit(whole)
        return self.scheme.unsplit(whole) if gathered(self.swarm, whole, self.cut.pieces) else None

    def _sketch(self) -> nn.Module:
        whole = sketch(self.config.model)
        self.scheme.fit(whole)
        return whole

    def _microbatch(self, number: int) -> Tensor:
        """A function of the seed, the step and the number, so any origin can run it."""
        assert self.text is not None
        first = (self.step - 1) * self.rows + number * self.form.sequences
        return self.text.loader.read(np.arange(first, first + self.form.sequences))


def ways_of(pipeline: PipelineConfig, stages: Sequence[int], patience: float) -> SwarmWays:
    """How microbatches travel. stages: by peer."""
    given, origins = pipeline.in_flight, stages.count(0)
    room = {"auto": -(-_AHEAD * len(stages) // origins), "1f1b": max(stages) + 1, "all": None}
    return SwarmWays(
        room=given if isinstance(given, int) else room[given],
        forward=pipeline.forward_deadline,
        backward=pipeline.backward_deadline,
        chooses_again=pipeline.consistency != "strict",
        patience=patience,
        keeps=pipeline.consistency == "exact",
    )
