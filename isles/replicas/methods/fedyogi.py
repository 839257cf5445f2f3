"""FedYogi (Reddi et al., 2021, arXiv 2003.00295, Algorithm 2): Yogi (Zaheer et al., 2018) as the outer optimizer.

    every H inner steps:    g = mean_i (anchor - theta_i)
                            m <- b1 m + (1 - b1) g                        0 at the start
                            v <- v - (1 - b2) g^2 sign(v - g^2)           tau^2 at the start
                            anchor <- anchor - lr m / (sqrt(v) + tau)
                            theta_i <- anchor

theta_i: live weights of worker i; lr: outer_lr; b1, b2: outer_betas; tau: the least size of a change that counts, in
units of the weights. Where changes grow small v falls by steps of their squares, not by a share of itself: slower than
`fedadam`'s, so a quiet round does not make the next one large. As in the paper nothing corrects m for its start: the
first rounds are short. v's start is the least that the paper allows. All workers take part in every round, with equal
weight. Memory: anchor, m and v, 12 bytes a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from isles.replicas.methods.config import FedAdamConfig
from isles.replicas.methods.fedavg import FedAvg
from isles.replicas.parts.interfaces import Answer, Composition, OuterRule, RuleState


@dataclass(frozen=True, kw_only=True)
class Yogi(OuterRule):
    """m <- b1 m + (1 - b1) g;  v <- v - (1 - b2) g^2 sign(v - g^2);  anchor <- anchor - lr m / (sqrt(v) + tau).
    b1: momentum.
    """

    lr: float
    b2: float
    tau: float
    vectors = ("mean", "square")

    @property
    @override
    def start(self) -> Mapping[str, float]:
        return {"square": self.tau**2}

    @override
    def apply(self, anchor: Tensor, answer: Answer, state: RuleState, round: int) -> None:
        g, m, v = answer.mean, state.vectors["mean"], state.vectors["square"]
        m.mul_(self.momentum).add_(g, alpha=1 - self.momentum)
        square = g.square_()
        v.sub_((v - square).sign_().mul_(square), alpha=1 - self.b2)
        anchor.addcdiv_(m, torch.sqrt(v, out=square).add_(self.tau), value=-self.lr)


class FedYogi(FedAvg):
    """All workers leave each exchange with equal anchors and weights."""

    Config = FedAdamConfig
    is_linear = False
    config: FedAdamConfig

    @override
    def compose(self) -> Composition:
        momentum, b2 = self.config.outer_betas
        rule = Yogi(lr=self.config.outer_lr, momentum=momentum, b2=b2, tau=self.config.tau)
        return replace(super().compose(), rule=rule)
