"""Post-local SGD (Lin et al., 2018, arXiv 1808.07217): average the parameters after every step at first, later only
every H steps.

    step t <= T:                        theta_i <- mean_j theta_j
    then, every H inner steps:          the same

The first phase is the paper's mini-batch SGD where the inner optimizer is plain SGD; Adam's moments stay each worker's
own, unlike under `ddp`. Memory: as `localsgd`.
"""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from isles.replicas.methods.config import PostLocalSGDConfig
from isles.replicas.methods.localsgd import LocalSGD
from isles.replicas.parts.choices import EveryH
from isles.replicas.parts.interfaces import Composition


class PostLocalSGD(LocalSGD):
    """All workers leave each exchange with equal weights."""

    Config = PostLocalSGDConfig
    config: PostLocalSGDConfig

    @override
    def compose(self) -> Composition:
        cadence = EveryH(self.config.sync_every, every_step_until=self.config.every_step_until)
        return replace(super().compose(), cadence=cadence)
