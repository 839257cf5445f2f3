"""Post-local SGD (Lin et al., 2018, arXiv 1808.07217): average the parameters after every step at first, later only
every H steps.

    step t <= T:                        theta_i <- mean_j theta_j
    then, every H inner steps:          the same

The first phase is the paper's mini-batch SGD where the inner optimizer is plain SGD; Adam's moments stay each worker's
own, unlike under `ddp`. Memory: as `localsgd`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from typing_extensions import override

from isles.replicas.checks import at_least
from isles.replicas.methods.localsgd import LocalSGD, LocalSGDConfig
from isles.replicas.parts.cadence import EveryH
from isles.replicas.parts.interfaces import Composition


@dataclass(frozen=True, kw_only=True)
class PostLocalSGDConfig(LocalSGDConfig):
    """Settings of `postlocal-sgd`."""

    every_step_until: int = 100
    """The last step of the first phase (T); a tenth of the run is a start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("every_step_until", self.every_step_until, 0)


class PostLocalSGD(LocalSGD):
    """All workers leave each exchange with equal weights."""

    Config = PostLocalSGDConfig
    config: PostLocalSGDConfig

    @override
    def compose(self) -> Composition:
        cadence = EveryH(self.config.sync_every, every_step_until=self.config.every_step_until)
        return replace(super().compose(), cadence=cadence)
