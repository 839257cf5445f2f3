"""Streaming DiLoCo (Douillard et al., 2025, arXiv 2501.18512, Algorithm 2): one fragment at a time, behind the
computation.

    every H inner steps, fragment q at its own offset t_q:
        at step t           g_i = anchor_q - theta_iq          sent as 4-bit floats
        at step t + tau     g   = mean_i g_i                   summed in float32
                            v_q <- mu v_q + g;  anchor_q <- anchor_q - lr (g + mu v_q)
                            theta_iq <- alpha theta_iq + (1 - alpha) anchor_q

theta_i: live weights of worker i; H: sync_every; tau: overlap_steps; alpha: merge_alpha, the weight of the local value;
fragments: see `cut`. All workers hold equal anchors whatever tau and alpha, which is why a model is judged by
its anchors. One fragment, tau = 0 and alpha = 0 are DiLoCo. Peak traffic is that of one fragment. The paper prints
neither mu nor alpha of its main runs: 0.9 and 0.5 (its ablation's) are the defaults here. Memory: as DiLoCo's.
"""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from isles.replicas.loop.fragment import cut
from isles.replicas.methods.config import StreamingConfig
from isles.replicas.methods.diloco import DiLoCo
from isles.replicas.parts.choices import Blend, EveryH
from isles.replicas.parts.interfaces import Composition


class StreamingDiLoCo(DiLoCo):
    """Anchors stay equal on all workers; live weights differ by what they did since the sending."""

    Config = StreamingConfig
    is_linear = False
    config: StreamingConfig

    @override
    def compose(self) -> Composition:
        config = self.config
        fragments = cut(self.model, config.fragments, config.layers_per_fragment)
        cadence = EveryH(config.sync_every, len(fragments), self._overlap(), first_sync=config.first_sync)
        return replace(super().compose(), cadence=cadence, fragments=fragments, landing=Blend(config.merge_alpha))

    def _overlap(self) -> int:
        steps = self.config.overlap_steps
        if isinstance(steps, int):
            return steps
        if len(steps) != self.group.size:
            raise ValueError(f"overlap_steps names {len(steps)} workers of {self.group.size}: give one number for each")
        return steps[self.group.rank]
