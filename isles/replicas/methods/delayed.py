"""DiLoCo with delayed outer gradients (Kale et al., 2025, arXiv 2502.12996, Algorithm 2): a mean takes a whole round to
arrive, behind the computation.

    at boundary k, every H inner steps:    g_i(k) = anchor - theta_i               sent
                                           A      = mean_i g_i(k - d)              arrives now; 0 for the first d
                                           v <- mu v + A;  anchor <- anchor - lr (A + mu v)
                                           theta_i <- anchor

theta_i: live weights of worker i; H: sync_every; d: outer_delay. Each round's progress enters d rounds late, and the
next one starts without it: the outer learning rate must be low (0.1 where DiLoCo takes 0.4), and Eager Updates do
better. All workers hold equal anchors. Memory: DiLoCo's, and d more buffers for what is under way.
"""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from isles.replicas.loop.fragment import cut
from isles.replicas.methods.config import DelayedConfig
from isles.replicas.methods.diloco import DiLoCo
from isles.replicas.parts.choices import EveryH, Received
from isles.replicas.parts.interfaces import Composition, Reading


class DelayedDiLoCo(DiLoCo):
    """All workers leave each boundary with equal anchors and weights."""

    Config = DelayedConfig
    config: DelayedConfig
    reading: Reading = Received()

    @override
    def compose(self) -> Composition:
        config = self.config
        fragments = cut(self.model, config.fragments, config.layers_per_fragment)
        cadence = EveryH(config.sync_every, len(fragments), rounds_late=config.outer_delay)
        return replace(super().compose(), cadence=cadence, reading=self.reading, fragments=fragments)
