"""FedAdam (Reddi et al., 2021, arXiv 2003.00295, Algorithm 2): Adam as the outer optimizer.

    every H inner steps, round t:    g = mean_i (anchor - theta_i)
                                     m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2        both 0 at the start
                                     anchor <- anchor - lr m' / (sqrt(v') + tau)
                                     theta_i <- anchor
    m' = m / (1 - b1^t);  v' = v / (1 - b2^t)

theta_i: live weights of worker i; lr: outer_lr; b1, b2: outer_betas; tau: the least size of a change that counts, in
units of the weights. Every weight moves by about lr a round, however much or little the workers moved it, so lr is of
the size of a weight's change in H steps, not near 1.

Deviations: the paper starts v at tau^2 or more and leaves m and v as they are, so that its first rounds are short (m is
a tenth of g); here both are corrected for their start, as in Adam itself (Kingma and Ba, 2015), for a run has few
rounds. `fedyogi` keeps to the paper. All workers take part in every round, with equal weight. Memory: anchor, m and v,
12 bytes a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from isles.replicas.methods.config import FedAdamConfig
from isles.replicas.methods.fedavg import FedAvg
from isles.replicas.parts.interfaces import Answer, Composition, OuterRule, RuleState


@dataclass(frozen=True, kw_only=True)
class Adam(OuterRule):
    """m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  anchor <- anchor - lr m' / (sqrt(v') + tau)."""

    lr: float
    betas: tuple[float, float]
    tau: float
    vectors = ("mean", "square")

    @override
    def apply(self, anchor: Tensor, answer: Answer, state: RuleState, round: int) -> None:
        (b1, b2), g, m, v = self.betas, answer.mean, state.vectors["mean"], state.vectors["square"]
        m.mul_(b1).add_(g, alpha=1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        size = torch.sqrt(v, out=g).mul_((1 - b2**round) ** -0.5).add_(self.tau)
        anchor.addcdiv_(m, size, value=-self.lr / (1 - b1**round))


class FedAdam(FedAvg):
    """All workers leave each exchange with equal anchors and weights."""

    Config = FedAdamConfig
    is_linear = False
    config: FedAdamConfig

    @override
    def compose(self) -> Composition:
        rule = Adam(lr=self.config.outer_lr, betas=self.config.outer_betas, tau=self.config.tau)
        return replace(super().compose(), rule=rule)
