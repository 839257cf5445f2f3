"""LocalSGD (Stich, 2018, arXiv 1805.09767): average the parameters every H steps.

    every H inner steps:    theta_i <- mean_j theta_j

theta: live weights. The parameters themselves travel, not differences, so one worker alone reproduces plain training to
the bit. Inner optimizer states stay local.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from isles.comm.codecs import codec
from isles.replicas.loop.outer import OuterSync
from isles.replicas.methods.config import LocalSGDConfig
from isles.replicas.parts.choices import EveryH, Everyone, Replace
from isles.replicas.parts.interfaces import Answer, Composition, OuterRule, RuleState


@dataclass(frozen=True, kw_only=True)
class Average(OuterRule):
    """anchor = mean of the live weights."""

    name = "average"

    @override
    def form(self, out: Tensor, live: Tensor, reference: Tensor, anchor: Tensor) -> None:
        """The live weights travel."""
        out.copy_(live)

    @override
    def apply(self, anchor: Tensor, answer: Answer, state: RuleState, round: int) -> None:
        anchor.copy_(answer.mean)


class LocalSGD(OuterSync):
    """All workers leave each exchange with equal weights."""

    Config = LocalSGDConfig
    is_linear = True
    config: LocalSGDConfig

    @override
    def compose(self) -> Composition:
        return Composition(
            cadence=EveryH(self.config.sync_every),
            mixing=Everyone(),
            codec=codec("none"),  # lossy parameters, without an anchor to correct them, stay wrong for good
            rule=Average(),
            landing=Replace(),
        )
