"""DiLoCo (Douillard et al., 2023, arXiv 2311.08105): an outer Nesterov step on the mean change of H inner steps.

    every H inner steps:    g_i = anchor - theta_i           outer gradient, float32
                            g   = mean_i g_i
                            v  <- mu v + g                   v = 0 at the start
                            anchor <- anchor - lr (g + mu v)
                            theta_i <- anchor

theta_i: live weights of worker i; lr, mu: outer learning rate and momentum (torch.optim.SGD's form of Nesterov, no
weight decay, no clipping). Inner optimizer states stay local and are never reset. Memory beyond training: anchor and v,
8 bytes a parameter, and 4 for g where it travels. Round 1 moves the anchor by lr (1 + mu) g, later ones by up to
lr / (1 - mu) g: a run needs well over 1 / (1 - mu) rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from isles.replicas.methods.config import DiLoCoConfig
from isles.replicas.methods.fedavg import FedAvg
from isles.replicas.parts.interfaces import Answer, Composition, OuterRule, RuleState


@dataclass(frozen=True, kw_only=True)
class Nesterov(OuterRule):
    """v <- mu v + g;  anchor <- anchor - lr (g + mu v)."""

    name = "nesterov"
    lr: float
    vectors = ("momentum",)

    @override
    def apply(self, anchor: Tensor, answer: Answer, state: RuleState, round: int) -> None:
        g, v = answer.mean, state.vectors["momentum"]
        # torch's fused kernel of this rule takes one pass over memory instead of four. It rounds the last ones, too few
        # for its registers, in another way: those go through plain operations, so bits do not depend on the blocks.
        tail = anchor.numel() % 16
        if tail:
            self._plainly(anchor[-tail:], g[-tail:], v[-tail:])
            anchor, g, v = anchor[:-tail], g[:-tail], v[:-tail]
        torch._fused_sgd_(
            [anchor],
            [g],
            [v] if self.momentum else [],  # what the kernel wants for mu = 0
            lr=self.lr,
            momentum=self.momentum,
            nesterov=True,
            dampening=0.0,
            weight_decay=0.0,
            maximize=False,
            is_first_step=False,
        )

    def _plainly(self, anchor: Tensor, g: Tensor, v: Tensor) -> None:
        v.mul_(self.momentum).add_(g)
        anchor.sub_(g.add_(v, alpha=self.momentum), alpha=self.lr)


class DiLoCo(FedAvg):
    """All workers leave each exchange with equal anchors and weights."""

    Config = DiLoCoConfig
    config: DiLoCoConfig

    @override
    def compose(self) -> Composition:
        rule = Nesterov(lr=self.config.outer_lr, momentum=self.config.outer_momentum)
        return replace(super().compose(), rule=rule)
