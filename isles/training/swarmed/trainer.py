"""One peer of a run in a swarm: `Trainer`, whose steps are the swarm's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from isles.comm.mesh import Mesh
from isles.comm.roster import Roster
from isles.data import Corpus
from isles.models import limits
from isles.models.stages import Stage
from isles.parsing import parse_json
from isles.pipeline.boundaries.scheme import Scheme
from isles.pipeline.pipeline import Cut
from isles.replicas.sync import ReplicaSync
from isles.training.assemble import wrapped
from isles.training.config.inner import lr_factor
from isles.training.config.sections import Config
from isles.training.records.checkpoint import join_state, split_state
from isles.training.records.tensors import copy_to_host
from isles.training.staged import build_stage, run_scheme, told_by_first
from isles.training.step import Step
from isles.training.swarmed.step import Left, Swarmed
from isles.training.text import Text
from isles.training.trainer import Trainer

_STRUCTURE = "__structure__"


class SwarmTrainer(Trainer):
    """The weights of a stage's peers are equal after every step, for all have the same gradient; so nothing is left to
    compare or to average.
    """

    model_step: Swarmed

    def __init__(
        self, config: Config, world: Mesh, corpus: Corpus | None = None, present: Sequence[int] | None = None
    ) -> None:
        """present: who is there from the start; None: all."""
        self._corpus, self._present = corpus, range(world.size) if present is None else present
        super().__init__(config, world, corpus)

    @override
    def run(self, out: Path | None) -> dict[str, Any] | None:
        try:
            if self.world.rank not in self._present:
                began = self.world.transport.now()
                self.model_step.enter()
                self.training_seconds += self.world.transport.now() - began  # it was blocked for so long
            return super().run(out)
        except Left:
            return None

    @override
    def step(self) -> None:
        super().step()
        self.tokens = self.model_step.tokens

    @override
    def _text(self, corpus: Corpus | None) -> Text:
        return Text(self.config, self.world, corpus, share=(0, 1))

    @override
    def _judging(self) -> bool:
        if self.world.rank not in self._present:
            return self._text(self._corpus).judges
        everyone = self.world.world.among(self._present)
        return told_by_first(everyone, self.text is not None and self.text.judges)

    @override
    def _wrapped(
        self, model: nn.Module, roster: Roster | None, manage: Callable[[nn.Module, Optimizer], Optimizer]
    ) -> tuple[ReplicaSync, list[str]]:
        alone = self.world.world.among([self.world.rank])  # what it knows of others the swarm tells it
        return wrapped(self.config, model, alone, self.world.inner, norm=lambda: self.model_step.norm)

    @override
    def _staged(self, cut: Cut, scheme: Scheme) -> Step:
        stage = cast(Stage, self.optimizer.model)
        return Swarmed(
            self.config,
            self.world,
            cut,
            scheme,
            stage,
            self.text,
            self.autocast,
            present=self._present,
            state=self._state,
            become=partial(self._become, cut),
        )

    def _state(self) -> bytes:
        """What a peer of this stage has between two steps, as safetensors."""
        optimizer = self.optimizer
        held = {"model": optimizer.weights(), "inner": optimizer.inner_state(), "steps": optimizer.steps}
        structure, tensors = split_state({**held, "schedule": self.schedule.state_dict()})
        text = torch.frombuffer(bytearray(json.dumps(structure).encode("ascii")), dtype=torch.uint8)
        return save({**copy_to_host(tensors), _STRUCTURE: text})

    def _become(self, cut: Cut, stage: int, given: Tensor) -> tuple[Stage, Scheme, Text | None]:
        """Serve `stage` from now on, with the state that a peer of it gave."""
        tensors = load(given.numpy().tobytes())
        state: Any = join_state(parse_json(tensors.pop(_STRUCTURE).numpy().tobytes()), tensors)
        served = self._rebuilt(cut, stage)
        self.optimizer.load_weights(state["model"])
        self.optimizer.load_inner_state(state["inner"])
        self.optimizer.steps = state["steps"]
        self.schedule.load_state_dict(state["schedule"])
        return served

    def _rebuilt(self, cut: Cut, stage: int) -> tuple[Stage, Scheme, Text | None]:
        """What serves `stage`, as drawn."""
        scheme = run_scheme(self.config, cut)
        if stage == 0 and self.text is None:
            self.text = self._text(self._corpus)
        made = build_stage(self.config, cut, scheme, stage, self.world.local_rank)
        self.optimizer, _ = self._wrapped(made, None, self.memory.manage)
        self.model = self.optimizer.model
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda done: lr_factor(done + 1, self.config.run.steps, self.config.inner)
        )
        return made, scheme, self.text if stage == 0 else None

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        stage = state["step"]["stages"][self.world.rank]
        if stage != self.model_step.swarm.stages[self.world.rank]:
            self.model_step.serve(*self._rebuilt(self.model_step.cut, stage))
        super().load_state_dict(state)

    @override
    def _gauges(self) -> dict[str, float]:
        return super()._gauges() | self.model_step.gauges()

    @override
    def _judge(self) -> float | None:
        if not self.judges:
            return None
        began = self.world.transport.now()
        loss = self.model_step.judge(())
        self.training_seconds += self.world.transport.now() - began  # waits of the swarm count as those of steps
        return loss

    @override
    def conclude(self, out: Path | None) -> dict[str, Any]:
        """Tokens are those of the steps, told by who puts the model together: some of who read them may be gone."""
        read = self.config.run.steps * self.model_step.rows * limits(self.config.model)[0]
        result = super().conclude(out)
        return result | {"tokens": read if result["parameters"] else 0}
