"""The main function of a run's workers, and the parts of a `Trainer` by its configuration.

whole model     text, model, optimizer -> `Whole`
in stages       text at the first stage, cut, boundaries, one stage, optimizer -> `Staged`, and recovery of lost stages
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from isles.comm.mesh import Mesh
from isles.comm.roster import Roster
from isles.comm.transport import Deadlines
from isles.comm.trust import JUMPS
from isles.data import Corpus
from isles.models import autocast, build, limits
from isles.models.factory import check_contract, check_marks, take_device
from isles.models.stages import Stage
from isles.pipeline.boundaries.scheme import Scheme
from isles.pipeline.pipeline import Cut
from isles.replicas.loop.outer import OuterSync
from isles.replicas.sync import ReplicaSync
from isles.training.config.conflicts import longest_wait, plan_of
from isles.training.config.reading import run_name
from isles.training.config.sections import Config
from isles.training.kinds import kind_of
from isles.training.memory.in_use import PlannedMemory
from isles.training.optimizer import weighs_samples, wrapped
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.saved_run import load_weights, start_file
from isles.training.setup import expectation, take_cores
from isles.training.stage_runner import (
    Staged,
    broadcast_from_first,
    build_stage,
    hold_against_whole,
    planned_cut,
    recovery_of,
    run_scheme,
)
from isles.training.step import StepRunner, Text, TrainerParts, Whole, seed_draws
from isles.training.trainer import Trainer

_PAUSES = 1000.0  # patience in mean pauses: a longer pause has probability e^-1000, and many fit into a round


def deadlines(config: Config) -> Deadlines:
    """The deadlines of [world]. A deadline tells a lost worker from a slow one; a paused worker comes back, so channels
    on which a worker cannot go on without it wait for the longest pause.
    """
    world = config.world
    own = Deadlines(
        outer=world.outer_deadline,
        eval=world.eval_deadline,
        pipeline=world.pipeline_deadline,
        slowest_link=world.slowest_link,
        join=world.join_deadline,
        silence=world.silence,
    )
    plan = plan_of(config.pipeline)
    if plan is not None:
        waits = {name: max(own.of(name), longest_wait(plan)) for name in ("inner", "outer", "pipeline")}
        own = replace(own, **waits)
    if world.virtual.pauses is None:
        return own
    patience = {
        name: max(_PAUSES * world.virtual.pause_seconds, own.of(name))
        for name in ("control", "inner", "outer", "pipeline", "eval")
    }
    return replace(own, **(patience | ({"outer": own.outer} if config.replicas.survives else {})))


def train_worker(
    world: Mesh, config: Config, out: Path | None = None, resume: int | None = None, corpus: Corpus | None = None
) -> dict[str, Any] | None:
    """The main function of a worker, which launchers start. resume: the step of the checkpoint to resume from. corpus:
    see `trainer_of`.
    """
    seed_draws(config.run.seed, world.rank)
    kind = kind_of(config.pipeline)
    return kind.train(world.arranged(kind.layout(config)), config, out, resume, corpus)


def train_replica(
    world: Mesh, config: Config, out: Path | None, resume: int | None, corpus: Corpus | None
) -> dict[str, Any] | None:
    """The main function of a worker with a `Trainer`."""
    kind = kind_of(config.pipeline)
    trainer = kind.trainer(config, world, corpus)
    with trainer.memory:
        if resume is not None:
            assert out is not None
            checkpoints = Checkpoints(out)
            trainer.load_state_dict(checkpoints.read_shard(resume, kind.rank_to_load(checkpoints, resume, world.rank)))
        return trainer.run(out)


def trainer_of(config: Config, world: Mesh, corpus: Corpus | None = None, roster: Roster | None = None) -> Trainer:
    """The trainer of one worker of `world`. corpus: that of `config.data`, if it is loaded already. roster: of the
    replicas, in an elastic run.
    """
    return Trainer(config, world, PartsMaker(config, world, corpus, roster).made())


class PartsMaker(TrainerParts):
    """Builds the parts of one worker's trainer; see `trainer_of`."""

    def __init__(self, config: Config, world: Mesh, corpus: Corpus | None = None, roster: Roster | None = None) -> None:
        self.config, self.world, self.corpus, self.roster = config, world, corpus, roster
        self.memory = PlannedMemory(config, take_device(config.model, world.local_rank), world.coordinate.stage)

    def made(self) -> TrainerParts:
        """Build all parts; returns self. ValueError, with the key, for settings that cannot be obeyed."""
        config, world, memory = self.config, self.world, self.memory
        by_plan = bool(config.pipeline.skippipe.plan)  # then nodes train on different numbers of microbatches
        uneven = not config.pipeline.is_grid and (by_plan or config.method != "none")
        world.world.ledger.trust.ratio = config.world.trust_ratio * (JUMPS if uneven else 1.0)
        self.name = run_name(config)
        self.text = self.read() if world.coordinate.stage == 0 else None
        self.validates = self._validates()
        cut = planned_cut(config) if config.pipeline.stages > 1 else None
        scheme = None if cut is None else run_scheme(config, cut)
        take_cores(config, memory.computes)
        model = self._whole_model() if cut is None or scheme is None else self._stage(cut, scheme)
        self.optimizer, self.notices = self.wrapped(model)
        if weighs_samples(config):
            self.notices += self._weigh()
        device = memory.device(self.optimizer.model)
        link = world.transport.link_estimate()
        self.notices += memory.notices + ([] if link is None else [expectation(self.optimizer, config, link)])
        self.scaler = torch.amp.GradScaler(device.type) if config.model.autocast == "fp16" else None
        self.autocast = partial(autocast, config.model, device)
        if cut is None or scheme is None:
            batches, self.recovery = config.inner.accumulation, None
            parts = self.optimizer, self.optimizer.model, self.autocast, self.scaler
            self.runner = Whole(*parts, batches, marks=self.text is not None and self.text.marks)
        else:
            self.runner = self._staged(cut, scheme)
            self.recovery = recovery_of(config, world, cut, cast(Stage, self.optimizer.model))
        return self

    def read(self) -> Text:
        """The text of a worker of the first stage."""
        return Text(self.config, self.world, self.corpus)

    def wrapped(self, model: nn.Module) -> tuple[ReplicaSync, list[str]]:
        """The run's optimizer, and notices for the user. ValueError as `isles.training.optimizer.wrapped`."""
        return wrapped(self.config, model, self.roster or self.world.outer, self.world, self.memory.manage)

    def _validates(self) -> bool:
        """With a plan the first column validates for all."""
        validates = broadcast_from_first(self.world.stage, self.text is not None and self.text.validates)
        return validates and (not self.config.pipeline.skippipe.plan or self.world.coordinate.replica == 0)

    def _staged(self, cut: Cut, scheme: Scheme) -> StepRunner:
        return Staged(self.config, self.world, cut, scheme, self.optimizer, self.autocast, self.memory.announce)

    def _whole_model(self) -> nn.Module:
        config, isolates = self.config, self.config.data.isolate_documents
        model = build(config.model, config.run.seed, self.world.local_rank, self.memory.home, isolates=isolates)
        if config.model.factory is not None:
            check_contract(model, config.model.factory, limits(config.model).context)
        if config.model.own is not None and self.text is not None and self.text.marks:
            check_marks(model, self.text.context, isolates=isolates)
        if config.run.start:
            load_weights(model, start_file(config.run.start), "[model], which run.start must be of")
        return model

    def _stage(self, cut: Cut, scheme: Scheme) -> Stage:
        """This worker's stage. The first worker compares the stages with the whole model first."""
        world = self.world
        if world.rank == 0 and (notice := hold_against_whole(self.config, cut)) is not None:
            world.report({"notice": notice})
        return build_stage(self.config, cut, scheme, world.coordinate.stage, world.local_rank, self.memory.home)

    def _weigh(self) -> list[str]:
        """Exchange the workers' numbers of sequences, for the weights of the mean. Returns notices."""
        assert isinstance(self.optimizer, OuterSync) and self.text is not None
        self.optimizer.weigh(self.text.sequences)
        text = 'weights = "samples": all workers have equal shares of the text with data.split = "iid"'
        return [] if self.text.split == "by_file" else [text]
