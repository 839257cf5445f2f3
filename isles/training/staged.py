"""A run whose model lies in stages: which piece this worker holds, and the `Step` that runs it.

batch of a replica -> microbatches at its origin -> executor -> losses at every stage
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from isles.comm.group import Group
from isles.comm.mesh import Mesh
from isles.models import build, choose_device, limits, sketch
from isles.models.config import ModelConfig
from isles.models.cuts import Costs, Piece, cut_points, decoder_costs, pieces
from isles.models.factory import DTYPES
from isles.models.stages import Stage, check_stages, costs_of, decoder_stage, is_tied
from isles.network.routing.orders import in_flight
from isles.network.routing.replay import TaskSeconds
from isles.pipeline.assemble import assembled
from isles.pipeline.boundaries.none import Plain
from isles.pipeline.config import PipelineConfig
from isles.pipeline.evaluation import Judge
from isles.pipeline.executor import Context, Executor, Ways
from isles.pipeline.routers.base import Router
from isles.pipeline.routers.fixed import FixedRouter
from isles.pipeline.routers.random import RandomRouter
from isles.pipeline.wire import Form
from isles.replicas.sync import ReplicaSync
from isles.training.config.sections import Config


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a run's model is cut. home: the loss is computed at the origin."""

    pieces: tuple[Piece, ...]
    home: bool
    costs: Costs

    def shares(self, microbatches: int, replicas: int, *, recompute: bool) -> TaskSeconds:
        """The share of an inner step's computation in each task of each position: a backward pass costs two forward
        ones, and one more where that is run again; the loss comes with its gradient.
        """
        whole = 3 * self.costs.total * microbatches
        forward = [sum(self.costs.blocks[number] for number in piece.blocks) / whole for piece in self.pieces]
        loss = [3 * self.costs.head / whole if piece.leaves else 0.0 for piece in self.pieces]
        backward = [(3 if recompute else 2) * share for share in forward]
        return TaskSeconds(forward=forward * replicas, loss=loss * replicas, backward=backward * replicas)


def cut_of(config: Config) -> Cut:
    """Where the model of `config` is cut. ValueError: it does not come in pieces, has fewer blocks than stages, or ties
    embedding and head while the loss is asked for at the last stage.
    """
    model, pipeline = sketch(config.model), config.pipeline
    tied = is_tied(model)
    if tied and pipeline.loss_at == "last":
        raise ValueError(
            'pipeline.loss_at = "last": the embedding of this model is its head as well, and both lie at the first '
            'stage; choose "origin", or model.tie_embeddings = false'
        )
    home = tied if pipeline.loss_at == "auto" else pipeline.loss_at == "origin"
    costs = decoder_costs(config.model.shape()) if config.model.own is None else costs_of(model)
    cuts = pipeline.cut or cut_points(costs.to_cut(loss_at_origin=home), pipeline.stages)
    return Cut(pieces=tuple(pieces(cuts, len(costs.blocks), loss_at_origin=home)), home=home, costs=costs)


def build_stage(config: Config, cut: Cut, stage: int, rank: int) -> Stage:
    """Stage `stage`, for worker `rank` of its machine, on its device; the decoder's is allocated and drawn alone."""
    device = choose_device(config.model, rank)
    piece = cut.pieces[stage]
    if config.model.own is None:
        made = decoder_stage(
            config.model.shape(), piece, seed=config.run.seed, device=device, dtype=DTYPES[config.model.dtype]
        )
    else:
        made = Stage(_built(config.model, config.run.seed), piece).to(device)
    if config.model.compile:
        made.compile()
    return made


def hold_against_whole(config: Config, cut: Cut) -> str | None:
    """Run the stages in turn and the whole model on one sequence and compare, on the CPU; on shapes alone where the
    whole does not fit, and then say so. ValueError where they differ.
    """
    context, vocab = limits(config.model)
    whole = sketch(config.model)
    too_large = sum(parameter.nbytes for parameter in whole.parameters()) > _free_bytes() / 2
    if not too_large:
        whole = _built(config.model, config.run.seed)
    device = next(whole.parameters()).device
    tokens = torch.arange(context, device=device).remainder(vocab or 2)[None]
    check_stages(whole, [piece.blocks.start for piece in cut.pieces[1:]], tokens)
    return "the whole model does not fit here: its stages were compared with it by shape alone" if too_large else None


def _built(config: ModelConfig, seed: int) -> nn.Module:
    return build(replace(config, device="cpu", compile=False, autocast="none"), seed=seed)


def _free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Staged:
    """One worker's stage of a pipelined run. See `isles.training.step.Step`."""

    def __init__(self, config: Config, world: Mesh, cut: Cut, optimizer: ReplicaSync, autocast: Context) -> None:
        self.config, self.world, self.cut = config, world, cut
        self.stage = cast(Stage, optimizer.model)
        self.optimizer = optimizer
        self.reads = world.stage.rank == 0
        pipeline = config.pipeline
        replicas, microbatches = world.outer.size, pipeline.microbatches
        context, vocab = limits(config.model)
        sequences = config.data.batch_size_per_worker(world.reader[1]) // microbatches
        form = Form(
            sequences=sequences,
            length=context,
            vocab=vocab or 1 << 31,
            dtype=next(self.stage.parameters()).dtype,
            boundary=Plain(self.stage.width),
        )
        self.executor = Executor(
            self.stage,
            world.pipeline,
            router_of(pipeline, replicas, home=cut.home, seed=config.run.seed),
            form,
            microbatches,
            Ways(
                room=in_flight(pipeline.in_flight, replicas, pipeline.stages),
                order=pipeline.order,
                recompute=pipeline.recompute,
                shares=cut.shares(microbatches, replicas, recompute=pipeline.recompute),
            ),
            quiet=optimizer.no_sync,
            autocast=autocast,
        )
        self.judging = Judge(self.stage, world.stage, form, home=cut.home, autocast=autocast)
        self._replica = world.layout.coordinates[world.rank].replica

    def run(self, batches: Iterable[Tensor]) -> Tensor:
        """See Step.run: the mean over the microbatches that came by."""
        rows = [part for batch in batches for part in batch.split(self.executor.form.sequences)]
        replicas = self.world.outer.size
        text = {u * replicas + self._replica: part for u, part in enumerate(rows)}
        losses = self.executor.step(self.optimizer.steps + 1, text)
        return torch.stack([losses[number] for number in sorted(losses)]).mean()

    def judge(self, batches: Iterable[Tensor]) -> float | None:
        """See Step.judge: told at the origin."""
        loss = self.judging.loss(batches)
        return loss if self.reads else None

    def whole(self, optimizer: ReplicaSync) -> nn.Module | None:
        """See Step.whole: at the origin of the first replica."""
        optimizer.consolidate()
        if self.world.outer.rank or self.world.inner.rank:
            return None
        one = _built(self.config.model, self.config.run.seed) if self.reads else sketch(self.config.model)
        return assembled(self.stage, self.world.stage, one, self.cut.pieces)


def router_of(pipeline: PipelineConfig, replicas: int, *, home: bool, seed: int) -> Router:
    """The router that [pipeline] names."""
    if pipeline.routing == "random":
        return RandomRouter(replicas, pipeline.stages, pipeline.microbatches, home, seed)
    return FixedRouter(replicas, pipeline.stages, pipeline.microbatches, home)


def told_by_first(stages: Group, answer: bool) -> bool:
    """What the first stage answers, known to all of a replica's stages."""
    told = torch.tensor([answer])
    if stages.size > 1:
        stages.broadcast(told, channel="control")
    return bool(told)
