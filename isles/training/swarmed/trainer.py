"""One peer of a run in a swarm: `Trainer`, whose steps are the swarm's."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from isles.comm.roster import Roster
from isles.data import Corpus
from isles.models.stages import Stage
from isles.pipeline.boundaries.scheme import Scheme
from isles.pipeline.pipeline import Cut
from isles.replicas.sync import ReplicaSync
from isles.training.assemble import wrapped
from isles.training.staged import told_by_first
from isles.training.step import Step
from isles.training.swarmed.step import Swarmed
from isles.training.text import Text
from isles.training.trainer import Trainer


class SwarmTrainer(Trainer):
    """The weights of a stage's peers are equal after every step, for all have the same gradient; so nothing is left to
    compare or to average.
    """

    model_step: Swarmed

    @override
    def step(self) -> None:
        super().step()
        self.tokens = self.model_step.tokens

    @override
    def _text(self, corpus: Corpus | None) -> Text:
        return Text(self.config, self.world, corpus, share=(0, 1))

    @override
    def _judging(self) -> bool:
        return told_by_first(self.world.world, self.text is not None and self.text.judges)

    @override
    def _wrapped(
        self, model: nn.Module, roster: Roster | None, manage: Callable[[nn.Module, Optimizer], Optimizer]
    ) -> tuple[ReplicaSync, list[str]]:
        alone = self.world.world.among([self.world.rank])  # what it knows of others the swarm tells it
        return wrapped(self.config, model, alone, self.world.inner, norm=lambda: self.model_step.norm)

    @override
    def _staged(self, cut: Cut, scheme: Scheme) -> Step:
        stage = cast(Stage, self.optimizer.model)
        return Swarmed(self.config, self.world, cut, scheme, stage, self.text, self.autocast)

    @override
    def _gauges(self) -> dict[str, float]:
        return super()._gauges() | self.model_step.gauges()

    @override
    def _judge(self) -> float | None:
        if not self.judges:
            return None
        return self.model_step.judge(())
