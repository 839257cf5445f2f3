"""NoLoCo's outer step from half the bytes: two exact reductions of what has to travel (see `noloco` for the symbols).

    single_vector   u = beta Delta + gamma phi travels:    delta <- alpha delta + mean u - gamma phi
    theta_only      theta travels, for gamma = beta:       delta <- alpha delta + beta (mean theta - phi)
    both            phi <- phi + delta

Both carry the small Delta inside the much larger phi, so they travel in full precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from isles.replicas.parts.interfaces import Answer, OuterRule, outer_gradient


@dataclass(frozen=True, kw_only=True)
class SingleVector(OuterRule):
    """delta <- alpha delta + mean u - gamma phi;  phi <- phi + delta;  with u = gamma phi - beta g."""

    name = "noloco"
    beta: float
    gamma: float
    vectors = ("momentum",)

    def form(self, out: Tensor, live: Tensor, reference: Tensor, anchor: Tensor) -> None:
        """u travels."""
        outer_gradient(out, live, reference)
        out.mul_(-self.beta).add_(anchor, alpha=self.gamma)

    def apply(self, anchor: Tensor, answer: Answer, vectors: Mapping[str, Tensor]) -> None:
        """See the class."""
        delta = vectors["momentum"]
        delta.mul_(self.momentum).add_(answer.mean.sub_(anchor, alpha=self.gamma))
        anchor.add_(delta)


@dataclass(frozen=True, kw_only=True)
class ThetaOnly(OuterRule):
    """delta <- alpha delta + beta (mean theta - phi);  phi <- phi + delta;  for gamma = beta."""

    name = "noloco"
    beta: float
    gamma: float
    vectors = ("momentum",)

    def form(self, out: Tensor, live: Tensor, reference: Tensor, anchor: Tensor) -> None:
        """theta travels, as phi - g: equal to the live weights up to rounding, and free of their coarser dtype's
        error.
        """
        outer_gradient(out, live, reference)
        out.neg_().add_(anchor)

    def apply(self, anchor: Tensor, answer: Answer, vectors: Mapping[str, Tensor]) -> None:
        """See the class."""
        delta = vectors["momentum"]
        delta.mul_(self.momentum).add_(answer.mean.sub_(anchor), alpha=self.beta)
        anchor.add_(delta)
