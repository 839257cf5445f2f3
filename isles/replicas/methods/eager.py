"""Eager Updates (Kale et al., 2025, arXiv 2502.12996, Algorithm 3): a mean takes a whole round to arrive, and meanwhile
this worker's own share of it is replaced by its fresh one.

    at boundary k, every H inner steps:    g_i(k) = anchor_i - theta_i             sent
                                           A      = mean_j g_j(k - d)              arrives now; 0 for the first d
                                           e      = A + (g_i(k) - g_i(k - d)) / M  own terms as the others decode them
                                           v_i <- mu v_i + e;  anchor_i <- anchor_i - lr (e + mu v_i)
                                           theta_i <- anchor_i

theta_i: live weights of worker i; H: sync_every; d: outer_delay; M: workers. Anchors and momenta are each worker's own:
they differ by the rounds in flight, a bounded amount; the model of the run is their mean. With d rounds' fresh shares
being 1/M of a step, it is meant for two islands; with more, lr <= 1 - mu (docs/outer-rate.md). Memory: DiLoCo's, d + 1
buffers of own shares, and d + 1 for what is under way.
"""

from __future__ import annotations

from typing_extensions import override

from isles.replicas.config import eager_rate
from isles.replicas.methods.config import EagerConfig
from isles.replicas.methods.delayed import DelayedDiLoCo
from isles.replicas.parts.choices import Eager
from isles.replicas.parts.interfaces import Reading


class EagerDiLoCo(DelayedDiLoCo):
    """Workers' anchors agree up to what is in flight."""

    Config = EagerConfig
    config: EagerConfig
    reading: Reading = Eager()

    @override
    def advise(self, steps: int) -> list[str]:
        config = self.config
        return super().advise(steps) + eager_rate(config.outer_lr, config.outer_momentum, self.group.size)
