"""FedAvg (McMahan et al., 2017, arXiv 1602.05629) as an outer method: the anchor moves to the mean of what the workers
made of it.

    every H inner steps:    g = mean_i (anchor - theta_i);  anchor <- anchor - lr g;  theta_i <- anchor

lr = 1 is the paper's average of the clients' models; other rates are the server's learning rate of Reddi et al. (2021).
All workers take part in every round, with equal weight (shares of data are equal here). Unlike `localsgd` changes
travel, not parameters, so lossy codecs with error feedback are allowed. Memory: the anchor, 4 bytes a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from isles.replicas.diloco import DiLoCo, DiLoCoConfig
from isles.replicas.parts import Answer, Composition, OuterRule, outer_gradient


@dataclass(frozen=True, kw_only=True)
class FedAvgConfig(DiLoCoConfig):
    """sync_every, codec, error_feedback, feedback_decay: as in DiLoCo. outer_lr: the server's rate."""

    sync_every: int = 50
    outer_lr: float = 1.0
    outer_momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.outer_momentum:
            raise ValueError(f"outer_momentum = {self.outer_momentum}: this method has none; choose diloco or slowmo")


@dataclass(frozen=True, kw_only=True)
class Descent(OuterRule):
    """anchor <- anchor - lr g."""

    name = "sgd"
    lr: float

    def form(self, out: Tensor, live: Tensor, reference: Tensor, anchor: Tensor) -> None:
        """The outer gradient travels."""
        outer_gradient(out, live, reference)

    def apply(self, anchor: Tensor, answer: Answer, vectors: Mapping[str, Tensor]) -> None:
        """See the class."""
        anchor.sub_(answer.mean, alpha=self.lr)


class FedAvg(DiLoCo):
    """See the module. All workers leave each exchange with equal anchors and weights."""

    Config = FedAvgConfig
    config: FedAvgConfig

    def compose(self) -> Composition:
        """See OuterSync.compose."""
        return replace(super().compose(), rule=Descent(lr=self.config.outer_lr))
