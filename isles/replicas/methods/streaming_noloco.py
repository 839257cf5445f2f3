"""NoLoCo by fragments: its outer step with one random partner, a part of the model at a time, landing some steps later.

    every m inner steps, fragment q at its own offset, in the random group of its round:
        at step t           Delta_iq = theta_iq - phi_iq leaves; phi_iq left when it last moved
        at step t + tau     delta_iq, phi_iq as in `noloco`
                            theta_iq <- alpha theta_iq + (1 - alpha) phi_iq

A composition of `noloco`'s rule and mixing with Streaming DiLoCo's cadence and landing (see there for tau, alpha and
the offsets), which neither paper has. One fragment, tau = 0 and alpha = 0 are NoLoCo. Each message is one fragment's to
one partner: the least peak traffic of all methods here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from typing_extensions import override

from isles.replicas.loop.fragments import FirstSync, Fragments, check_fragments, cut
from isles.replicas.methods.noloco import NoLoCo, NoLoCoConfig
from isles.replicas.parts.cadence import EveryH
from isles.replicas.parts.interfaces import Composition
from isles.replicas.parts.landing import Blend


@dataclass(frozen=True, kw_only=True)
class StreamingNoLoCoConfig(NoLoCoConfig):
    """Settings of `streaming-noloco`."""

    sync_every: int = 100
    fragments: Fragments = "strided"
    """How the model is cut: "strided", "sequential", "whole", or lists of parameter names or their beginnings."""
    layers_per_fragment: int | None = None
    """Blocks in each; left out, 3, or half of a shorter model's."""
    overlap_steps: int = 1
    """Inner steps after which an answer lands (tau), below sync_every, the same for all."""
    merge_alpha: float = 0.5
    """Share of the live weights where they meet the anchor (alpha), 0..1."""
    first_sync: FirstSync = "full_window"
    """When a fragment is first sent: "full_window", after H steps; "offset", at its own offset."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fragments(self.fragments, self.layers_per_fragment, self.first_sync)
        if not 0 <= self.overlap_steps < self.sync_every:
            raise ValueError(f"overlap_steps = {self.overlap_steps}: choose 0 to {self.sync_every - 1}")
        if not 0 <= self.merge_alpha <= 1:
            raise ValueError(f"merge_alpha = {self.merge_alpha}: choose the local weights' share, 0 to 1")


class StreamingNoLoCo(NoLoCo):
    """Only partners wait for each other; under failure as NoLoCo."""

    Config = StreamingNoLoCoConfig
    is_linear = False
    config: StreamingNoLoCoConfig

    @override
    def compose(self) -> Composition:
        config = self.config
        fragments = cut(self.model, config.fragments, config.layers_per_fragment)
        cadence = EveryH(config.sync_every, len(fragments), config.overlap_steps, first_sync=config.first_sync)
        return replace(super().compose(), cadence=cadence, fragments=fragments, landing=Blend(config.merge_alpha))
