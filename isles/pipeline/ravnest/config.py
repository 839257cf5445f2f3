"""The `[pipeline.ravnest]` table: clusters of asynchronous stages. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isles.errors import demand


@dataclass(frozen=True, kw_only=True)
class RavnestConfig:
    """With pipeline.routing = "ravnest"."""

    clusters: tuple[tuple[int, ...], ...] = ()
    """Of every cluster the first block of each stage but the first, so [[2, 4], [3], []] are clusters of 3, 2 and 1
    stages, workers in that order; empty: alike, cut as `cut` says.
    """
    stage_lr: Literal["1", "1/(1+tau)"] = "1"
    """Factor on the learning rate of an update by a gradient tau updates old."""
    average_optimizer: bool = False
    """Clusters average the optimizer's state as well as the weights."""
    spares: int = 0
    """Where workers come and go: so many of those who wait go on standing by for lost ones; the others make new
    clusters as soon as they can.
    """

    def __post_init__(self) -> None:
        demand(self, "spares", lambda x: x >= 0, "choose 0 or more")
        if self.clusters and not any(self.clusters):
            raise ValueError('clusters of one stage each are replicas: leave routing out, and choose method "localsgd"')
