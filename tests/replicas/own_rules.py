"""Outer rules as somebody outside of the package writes them: an Adam that learns its rate, and a Muon."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import isles
from isles.replicas.parts.interfaces import Answer, Composition, OuterRule, RuleState


@dataclass(frozen=True, kw_only=True)
class LearnedAdam(OuterRule):
    """Adam whose rate r follows its hypergradient (in the form of Baydin et al., 2018, arXiv 1703.04782):

        m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  anchor <- anchor - r m' / (sqrt(v') + tau)
        r <- r + kappa g . g_before                                  for the next round; g_before = 0 in the first

    m', v': corrected for their start. The dot product is over all entries of the fragment.
    """

    lr: float = 0.02
    kappa: float = 1e-3
    betas: tuple[float, float] = (0.8, 0.9)
    tau: float = 1e-3
    vectors = ("mean", "square", "before")
    scalars = ("rate", "dot")

    @property
    def start(self) -> Mapping[str, float]:
        return {"rate": self.lr}

    def apply(self, anchor: Tensor, answer: Answer, state: RuleState, round: int) -> None:
        (b1, b2), g, before = self.betas, answer.mean, state.vectors["before"]
        m, v = state.vectors["mean"], state.vectors["square"]
        state.scalars["dot"] += float(g.dot(before))
        before.copy_(g)
        m.mul_(b1).add_(g, alpha=1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        size = (v / (1 - b2**round)).sqrt_().add_(self.tau)
        anchor.addcdiv_(m, size, value=-state.scalars["rate"] / (1 - b1**round))

    def end(self, scalars: MutableMapping[str, float], round: int) -> None:
        scalars["rate"] += self.kappa * scalars["dot"]
        scalars["dot"] = 0.0


@dataclass(frozen=True, kw_only=True)
class OuterMuon(OuterRule):
    """V <- mu V + G;  anchor <- anchor - lr O(V)  for matrices, with O(V) = U W^T of V = U S W^T by Newton-Schulz:

        X = V / |V|;  X <- 1.5 X - 0.5 X X^T X,  `iterations` times

    Vectors, and the parameters in `plain`:  anchor <- anchor - lr g.
    """

    lr: float = 0.02
    iterations: int = 40
    plain: tuple[str, ...] = ()
    momentum: float = 0.5
    vectors = ("momentum",)
    whole = True

    def apply(self, anchor: Tensor, answer: Answer, state: RuleState, round: int) -> None:
        if anchor.dim() != 2 or state.name in self.plain:
            anchor.sub_(answer.mean, alpha=self.lr)
            return
        v = state.vectors["momentum"].mul_(self.momentum).add_(answer.mean)
        x = v / v.norm().clamp_min(1e-30)
        for _ in range(self.iterations):
            x = 1.5 * x - 0.5 * (x @ x.T) @ x
        anchor.sub_(x, alpha=self.lr)


class LearnedOuterAdam(isles.Custom):
    """Any composition with that rule."""

    def compose(self) -> Composition:
        return replace(super().compose(), rule=LearnedAdam())


class OuterMuonMethod(isles.Custom):
    """Any composition with that rule, but for the parameter `second`."""

    def compose(self) -> Composition:
        return replace(super().compose(), rule=OuterMuon(plain=("second",)))


def orthogonal(v: Tensor) -> Tensor:
    """What Newton-Schulz comes to: all singular values 1."""
    u, _, w = torch.linalg.svd(v, full_matrices=False)
    return u @ w
