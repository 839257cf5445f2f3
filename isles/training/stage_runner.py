"""A run whose model is cut into stages: this worker's piece, and the `StepRunner` that runs it.

batch of a replica -> microbatches at its origin -> executor -> losses at every stage
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from isles.base.memory import free_memory
from isles.base.parts import names_code
from isles.comm.group import Group
from isles.comm.mesh import Mesh
from isles.models import build, choose_device, limits, sketch
from isles.models.config import ModelConfig
from isles.models.cuts import decoder_costs
from isles.models.factory import DTYPES, check_contract, compiled
from isles.models.stages import Stage, check_stages, decoder_stage
from isles.network.routing.events import Span
from isles.network.routing.plan import as_json
from isles.pipeline.boundaries.names import boundary_name
from isles.pipeline.boundaries.scheme import Scheme
from isles.pipeline.compute import Context
from isles.pipeline.executor import Announce
from isles.pipeline.pipeline import Cut, Pipeline, cut_of, router_of
from isles.pipeline.recovery import Recovery
from isles.replicas import method
from isles.replicas.start import same_settings
from isles.replicas.sync import ReplicaSync
from isles.training.config.conflicts import plan_of
from isles.training.config.sections import Config


def planned_cut(config: Config) -> Cut:
    """Where the model of `config` is cut; ValueError as `cut_of`, or where a plan cuts it elsewhere."""
    costs = decoder_costs(config.model.shape()) if config.model.own is None else None
    pipeline, plan = config.pipeline, plan_of(config.pipeline)
    cuts = pipeline.cut or (() if plan is None else plan.cuts or ())
    return cut_of(sketch(config.model), pipeline.stages, costs=costs, cut=cuts, loss_at=pipeline.where_loss)


def refuse_stages(config: Config) -> None:
    """ValueError, with the key, for a model or a method that does not go into stages, before anything is made."""
    if config.pipeline.stages == 1:
        return
    if method(config.method).needs_whole:
        raise ValueError(
            f'replicas.method = "{config.method}" needs the whole model at every worker: choose another one, or train '
            "without stages (pipeline.stages = 1)"
        )
    cut, pipeline = planned_cut(config), config.pipeline
    if boundary_name(pipeline.boundary.kind).kind == "own":
        run_scheme(config, cut)
    if names_code("router", pipeline.routing):
        router_of(pipeline, config.replicas_in_all, home=cut.home, seed=config.run.seed)(1)


def run_scheme(config: Config, cut: Cut) -> Scheme:
    """The boundary scheme of a run, for one worker. ValueError as `Cut.scheme`, or if the replicas' exchanges would
    move weights out of the subspace.
    """
    pipeline, codec_name = config.pipeline, str(getattr(config.replicas, "codec", "none"))
    if pipeline.boundary.form != "coordinates" and (codec_name != "none" or not method(config.method).is_linear):
        setting = f'replicas.codec = "{codec_name}"' if codec_name != "none" else f'replicas.method = "{config.method}"'
        raise ValueError(
            f'pipeline.boundary.form = "{pipeline.boundary.form}" with {setting}: what replicas exchange would leave '
            'the subspace, for it does more than scale and add rows; choose form = "coordinates"'
        )
    return cut.scheme(pipeline, vocab=limits(config.model).vocab, seed=config.run.seed)


def build_stage(
    config: Config, cut: Cut, scheme: Scheme, stage: int, rank: int, home: torch.device | None = None
) -> Stage:
    """Stage `stage`, for worker `rank` of its machine, fitted to `scheme`; of a decoder only this stage is allocated
    and drawn. home: device of its weights; None: the one that the worker computes on.
    """
    device, piece = home or choose_device(config.model, rank), cut.pieces[stage]
    if config.model.own is None:
        dtype = DTYPES[config.model.dtype]
        shape = config.model.shape()
        tokens = config.model.loss_tokens(shape.vocab)
        made = decoder_stage(shape, piece, seed=config.run.seed, device=device, dtype=dtype, loss_tokens=tokens)
    else:
        made = Stage(on_host(config.model, config.run.seed), piece).to(device)
    scheme.fit(made)
    return cast(Stage, compiled(made, config.model))


def recovery_of(config: Config, world: Mesh, cut: Cut, stage: Stage) -> Recovery | None:
    """The recovery of lost stages; None if none are lost. ValueError if no stage can replace another."""
    pipeline, seed = config.pipeline, config.run.seed
    if not pipeline.recovery.stage_loss:
        return None

    def fresh_weights(draw: int) -> Mapping[str, Tensor]:
        anew = replace(config, run=replace(config.run, seed=seed + draw))
        return build_stage(anew, cut, run_scheme(anew, cut), world.coordinate.stage, world.local_rank).state_dict()

    return Recovery(stage, world, [len(piece.blocks) for piece in cut.pieces], pipeline.recovery, seed, fresh_weights)


def hold_against_whole(config: Config, cut: Cut) -> str | None:
    """Run the stages in turn and the whole model on one sequence and compare, on the CPU; on shapes alone where the
    whole does not fit, and then say so. ValueError where they differ.
    """
    context, vocab = limits(config.model)
    whole = sketch(config.model)
    too_large = sum(parameter.nbytes for parameter in whole.parameters()) > free_memory() / 2
    if not too_large:
        whole = on_host(config.model, config.run.seed)
        if config.model.factory is not None:
            check_contract(whole, config.model.factory, context)
    where = next(whole.parameters()).device
    tokens = torch.arange(context, device=where, dtype=torch.int64).remainder(vocab or 2)[None]
    check_stages(whole, cut.begins, tokens)
    scheme = run_scheme(config, cut)
    scheme.fit(whole)
    scheme.check(whole, tokens)
    return "the whole model does not fit here: its stages were compared with it by shape alone" if too_large else None


class Staged:
    """One worker's stage of a pipelined run, as a `StepRunner`."""

    def __init__(
        self,
        config: Config,
        world: Mesh,
        cut: Cut,
        scheme: Scheme,
        optimizer: ReplicaSync,
        autocast: Context,
        announce: Announce,
    ) -> None:
        context, vocab = limits(config.model)
        self._config, self._world, self._optimizer = config, world, optimizer
        plan = plan_of(config.pipeline)
        if plan is not None:
            same_settings(world.world, as_json(plan))  # every machine reads a file of its own
        self._pipeline = Pipeline(
            cast(Stage, optimizer.model),
            world,
            batch_size=config.data.batch_size_per_worker(world.reader[1]),
            context=context,
            vocab=vocab,
            cut=cut,
            scheme=scheme,
            quiet=optimizer.no_sync,
            autocast=autocast,
            announce=announce,
            seed=config.run.seed,
            config=config.pipeline,
            plan=plan,
        )
        self.reads = self._pipeline.reads

    @property
    def played(self) -> Sequence[Span]:
        return self._pipeline.executor.played

    def run(self, batches: Iterable[Tensor]) -> Tensor | None:
        return self._pipeline.step(next(iter(batches), None), self._optimizer.steps + 1)

    def state_dict(self) -> dict[str, Any] | None:
        return self._pipeline.turns.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        self._pipeline.turns.load_state_dict(state)

    def evaluate(self, batches: Callable[[], Iterable[Tensor]]) -> float | None:
        loss = self._pipeline.judge(batches())
        return loss if self.reads else None

    def whole(self, optimizer: ReplicaSync) -> nn.Module | None:
        optimizer.consolidate()
        if self._world.outer.rank or self._world.inner.rank:
            return None  # the first worker of each stage of the first replica gathers the model
        model, seed = self._config.model, self._config.run.seed
        return self._pipeline.assembled(on_host(model, seed) if self.reads else sketch(model))


def broadcast_from_first(stages: Group, answer: bool) -> bool:
    """The answer of the first stage, at all of a replica's stages."""
    flag = torch.tensor([answer], dtype=torch.bool, device="cpu")
    if stages.size > 1:
        stages.broadcast(flag, channel="control")
    return bool(flag)


def on_host(config: ModelConfig, seed: int) -> nn.Module:
    """The whole model, drawn, on the CPU."""
    return build(replace(config, device="cpu", compile=False, autocast="none"), seed=seed)
