"""What a `Trainer` is handed: text, optimizer, memory and a way to run the model, as the configuration says.

whole model     text, model, optimizer -> `Whole`
in stages       text at the first stage, cut, boundaries, one stage, optimizer -> `Staged`, and what mends lost stages
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import nn

from isles.comm.mesh import Mesh
from isles.comm.roster import Roster
from isles.comm.trust import JUMPS
from isles.data import Corpus
from isles.models import autocast, build, limits
from isles.models.factory import take_device
from isles.models.own import check_contract
from isles.models.stages import Stage
from isles.pipeline.boundaries.scheme import Scheme
from isles.pipeline.compute import Context
from isles.pipeline.pipeline import Cut
from isles.replicas.loop.outer import OuterSync
from isles.replicas.sync import ReplicaSync
from isles.training.assemble import weighs_samples, wrapped
from isles.training.config.reading import run_name
from isles.training.config.sections import Config
from isles.training.cores import take_cores
from isles.training.expected import expectation
from isles.training.memory.at_work import PlannedMemory
from isles.training.records.saved import start_weights
from isles.training.staged import (
    Staged,
    build_stage,
    hold_against_whole,
    planned_cut,
    recovery_of,
    run_scheme,
    told_by_first,
)
from isles.training.step import StepRunner, TrainerParts, Whole
from isles.training.text import Text
from isles.training.trainer import Trainer


def trainer_of(config: Config, world: Mesh, corpus: Corpus | None = None, roster: Roster | None = None) -> Trainer:
    """One worker of a run whose workers are those of `world`. corpus: that of `config.data`, where it was loaded
    already. roster: of the replicas, where they come and go.
    """
    return Trainer(config, world, PartsMaker(config, world, corpus, roster).made())


class PartsMaker:
    """Of one worker; see `trainer_of`."""

    def __init__(self, config: Config, world: Mesh, corpus: Corpus | None = None, roster: Roster | None = None) -> None:
        self.config, self.world, self.corpus, self.roster = config, world, corpus, roster
        self.memory = PlannedMemory(config, take_device(config.model, world.local_rank), world.place.stage)

    def made(self) -> TrainerParts:
        """All of them. ValueError, with the key, where the run cannot mean what the configuration says."""
        config, world, memory = self.config, self.world, self.memory
        by_plan = bool(config.pipeline.skippipe.plan)  # some nodes learn more than others, as more comes by them
        uneven = not config.pipeline.is_grid and (by_plan or config.method != "none")
        world.world.ledger.trust.ratio = config.world.trust_ratio * (JUMPS if uneven else 1.0)
        text = self.text() if world.place.stage == 0 else None
        judges = self._judges(text)
        cut = planned_cut(config) if config.pipeline.stages > 1 else None
        scheme = None if cut is None else run_scheme(config, cut)
        take_cores(config, memory.computes)
        model = self._whole_model() if cut is None or scheme is None else self._stage(cut, scheme)
        optimizer, notices = self.wrapped(model)
        if weighs_samples(config):
            notices += _weigh(optimizer, text)
        device = memory.device(optimizer.model)
        line = world.transport.line()
        notices += memory.notices + ([] if line is None else [expectation(optimizer, config, line)])
        scaler = torch.amp.GradScaler(device.type) if config.model.autocast == "fp16" else None
        cast_to = partial(autocast, config.model, device)
        runner: StepRunner = (
            Whole(optimizer, optimizer.model, cast_to, scaler, batches=config.inner.accumulation)
            if cut is None or scheme is None
            else self._staged(cut, scheme, optimizer, text, cast_to)
        )
        return TrainerParts(
            name=run_name(config),
            text=text,
            judges=judges,
            memory=memory,
            optimizer=optimizer,
            runner=runner,
            recovery=None if cut is None else recovery_of(config, world, cut, cast(Stage, optimizer.model)),
            scaler=scaler,
            autocast=cast_to,
            notices=notices,
        )

    def text(self) -> Text:
        """What a worker of the first stage reads."""
        return Text(self.config, self.world, self.corpus)

    def wrapped(self, model: nn.Module) -> tuple[ReplicaSync, list[str]]:
        """The optimizer of the run, or a refusal; and what is to be said of it."""
        world = self.world
        return wrapped(
            self.config,
            model,
            self.roster or world.outer,
            world.inner,
            world.stage,
            self.memory.manage,
            everyone=world.world,
        )

    def _judges(self, text: Text | None) -> bool:
        """With a plan the first column judges for all."""
        judges = told_by_first(self.world.stage, text is not None and text.judges)
        return judges and (not self.config.pipeline.skippipe.plan or self.world.place.replica == 0)

    def _staged(
        self, cut: Cut, scheme: Scheme, optimizer: ReplicaSync, text: Text | None, cast_to: Context
    ) -> StepRunner:
        """How this worker runs its stage."""
        return Staged(self.config, self.world, cut, scheme, optimizer, cast_to, self.memory.announce)

    def _whole_model(self) -> nn.Module:
        """The model of the run."""
        config = self.config
        model = build(config.model, config.run.seed, self.world.local_rank, self.memory.home)
        if config.model.factory is not None:
            check_contract(model, config.model.factory, limits(config.model).context)
        if config.run.start:
            start_weights(model, config.run.start)
        return model

    def _stage(self, cut: Cut, scheme: Scheme) -> Stage:
        """This worker's piece of it. The first worker holds all pieces against the whole before anybody trains."""
        world = self.world
        if world.rank == 0 and (notice := hold_against_whole(self.config, cut)) is not None:
            world.report({"notice": notice})
        return build_stage(self.config, cut, scheme, world.place.stage, world.local_rank, self.memory.home)


def _weigh(optimizer: ReplicaSync, text: Text | None) -> list[str]:
    """Tell the others how much text this worker has."""
    assert isinstance(optimizer, OuterSync) and text is not None
    optimizer.weigh(text.loader.sequences)
    told = 'weights = "samples": all workers have equal shares of the text with data.split = "iid"'
    return [] if text.loader.split == "by_file" else [told]
