"""SPARTA (Beton et al., 2025): average a small random part of the parameters after every step.

    every H inner steps:    theta_i[m] <- mean_j theta_j[m]       m: a random fraction f of the entries, the same
                            theta_i elsewhere: as it is              for all, drawn anew each time

No anchor is needed to correct what is not sent: it stays each worker's own. After k exchanges a fraction 1 - (1-f)^k of
the weights has met the others. Replicas stay a little apart; the model of the run is their mean. Memory: two copies of
the weights, 8 bytes a parameter, and 4 while the entries travel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from isles.comm.codecs import codec
from isles.replicas.methods.config import SPARTAConfig
from isles.replicas.methods.localsgd import Average, LocalSGD
from isles.replicas.parts.interfaces import Answer, Composition, RuleState


@dataclass(frozen=True, kw_only=True)
class AveragePart(Average):
    """anchor = mean of the live weights where they travel, the own ones elsewhere."""

    needs_residual: ClassVar[bool] = True

    @override
    def apply(self, anchor: Tensor, answer: Answer, state: RuleState, round: int) -> None:
        assert answer.left is not None
        anchor.copy_(answer.mean.add_(answer.left))  # each entry is in one of them, and zero in the other


class SPARTA(LocalSGD):
    """Workers agree on what travelled last."""

    Config = SPARTAConfig
    is_linear = False
    config: SPARTAConfig

    @override
    def compose(self) -> Composition:
        form = codec(f"randk:{self.config.fraction!r}")
        return replace(super().compose(), rule=AveragePart(), codec=form)
