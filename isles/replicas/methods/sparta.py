"""SPARTA (Beton et al., 2025): average a small random part of the parameters after every step.

    every H inner steps:    theta_i[m] <- mean_j theta_j[m]       m: a random fraction f of the entries, the same
                            theta_i elsewhere: as it is              for all, drawn anew each time

No anchor is needed to correct what is not sent: it stays each worker's own. After k exchanges a fraction 1 - (1-f)^k of
the weights has met the others. Replicas stay a little apart; the model of the run is their mean. Memory: two copies of
the weights, 8 bytes a parameter, and 4 while the entries travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from isles.comm.codecs import codec
from isles.replicas.methods.localsgd import Average, LocalSGD, LocalSGDConfig
from isles.replicas.parts.interfaces import Answer, Composition
from isles.replicas.space import Dimension


@dataclass(frozen=True, kw_only=True)
class SPARTAConfig(LocalSGDConfig):
    """Settings of `sparta`."""

    sync_every: int = 1
    """Inner steps between two exchanges (H)."""
    fraction: float = 0.005
    """Share of the entries that travels (f); published runs took 0.0005 to 0.005."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction = {self.fraction}: choose a fraction above 0, up to 1, such as 0.005")

    @override
    def space(self, steps: int, *, timed: bool) -> list[Dimension]:
        sent = Dimension.around("replicas.fraction", self.fraction, 4, most=1.0)
        return [*super().space(steps, timed=timed), *([sent] if timed else [])]


@dataclass(frozen=True, kw_only=True)
class AveragePart(Average):
    """anchor = mean of the live weights where they travel, the own ones elsewhere."""

    keeps_left: ClassVar[bool] = True

    @override
    def apply(self, anchor: Tensor, answer: Answer, vectors: Mapping[str, Tensor], round: int) -> None:
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
