"""SlowMo (Wang et al., 2019, arXiv 1910.00643): a slow momentum on top of local SGD.

    every H inner steps:    g = mean_i (anchor - theta_i)
                            v <- beta v + g;  anchor <- anchor - alpha v;  theta_i <- anchor

alpha: outer_lr (1 in the paper), beta: outer_momentum. The paper divides g by the inner learning rate and multiplies v
by it again; with a rate that changes slowly this is the same, and a decaying one then damps old rounds less here. Inner
optimizer states are kept (its "maintain"). Memory: anchor and v, 8 bytes a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from typing_extensions import override

from isles.replicas.methods.config import SlowMoConfig
from isles.replicas.methods.diloco import DiLoCo
from isles.replicas.parts.interfaces import Answer, Composition, OuterRule, RuleState


@dataclass(frozen=True, kw_only=True)
class HeavyBall(OuterRule):
    """v <- momentum v + g;  anchor <- anchor - lr v."""

    name = "heavy_ball"
    vectors = ("momentum",)
    lr: float

    @override
    def apply(self, anchor: Tensor, answer: Answer, state: RuleState, round: int) -> None:
        anchor.sub_(state.vectors["momentum"].mul_(self.momentum).add_(answer.mean), alpha=self.lr)


class SlowMo(DiLoCo):
    """All workers leave each exchange with equal anchors and weights."""

    Config = SlowMoConfig
    config: SlowMoConfig

    @override
    def compose(self) -> Composition:
        rule = HeavyBall(lr=self.config.outer_lr, momentum=self.config.outer_momentum)
        return replace(super().compose(), rule=rule)
