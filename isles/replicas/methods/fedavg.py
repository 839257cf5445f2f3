"""FedAvg (McMahan et al., 2017, arXiv 1602.05629) as an outer method: the anchor moves to the mean of what the workers
made of it.

    every H inner steps:    g = mean_i (anchor - theta_i);  anchor <- anchor - lr g;  theta_i <- anchor

lr = 1 is the paper's average of the clients' models; other rates are the server's learning rate of Reddi et al. (2021).
All workers take part in every round, with equal weight (shares of data are equal here). Unlike `localsgd` changes
travel, not parameters, so lossy codecs with error feedback are allowed. Memory: the anchor, 4 bytes a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from isles.comm.codecs import form
from isles.replicas.loop.outer import OuterSync
from isles.replicas.methods.config import FedAvgConfig
from isles.replicas.parts.choices import EveryH, Everyone, Replace
from isles.replicas.parts.interfaces import Answer, Composition, OuterRule, RuleState, feedback


@dataclass(frozen=True, kw_only=True)
class Descent(OuterRule):
    """anchor <- anchor - lr g."""

    name = "sgd"
    lr: float

    @override
    def apply(self, anchor: Tensor, answer: Answer, state: RuleState, round: int) -> None:
        anchor.sub_(answer.mean, alpha=self.lr)


class FedAvg(OuterSync):
    """All workers leave each exchange with equal anchors and weights."""

    Config = FedAvgConfig
    is_linear = True
    config: FedAvgConfig

    @override
    def compose(self) -> Composition:
        return Composition(
            cadence=EveryH(self.config.sync_every),
            mixing=Everyone(),
            rule=Descent(lr=self.config.outer_lr),
            landing=Replace(),
            codec=form(self.config.codec, self.config.options_of("codec")),
            feedback=feedback(self.config.error_feedback, self.config.feedback_decay),
        )
