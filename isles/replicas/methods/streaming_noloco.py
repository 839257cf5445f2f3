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

from dataclasses import replace

from typing_extensions import override

from isles.replicas.loop.fragment import cut
from isles.replicas.methods.config import StreamingNoLoCoConfig
from isles.replicas.methods.noloco import NoLoCo
from isles.replicas.parts.choices import Blend, EveryH
from isles.replicas.parts.interfaces import Composition


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
