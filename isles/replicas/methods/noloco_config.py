"""Settings of `noloco` and `streaming-noloco`; symbols as there. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from typing_extensions import override

from isles.comm.codecs.kinds import read_form
from isles.replicas.checks import at_least, momentum_in_range, one_of, positive_rate
from isles.replicas.loop.config import FirstSync, Fragments, OuterConfig, check_fragments
from isles.replicas.parts.legal import PLAIN, refuse

ExchangeForm = Literal["delta+phi", "single_vector", "theta_only"]


@dataclass(frozen=True, kw_only=True)
class NoLoCoConfig(OuterConfig):
    """Settings of `noloco`; defaults of the paper, Table 1, and of its code."""

    sync_every: int = 50
    """Inner steps a round (m)."""
    outer_lr: float = 0.7
    """Outer learning rate (beta)."""
    outer_momentum: float = 0.5
    """Outer momentum (alpha)."""
    gamma: float | None = None
    """Pull to the group's anchors; left out, it equals outer_lr."""
    group_size: int = 2
    """Workers a group (n)."""
    exchange: ExchangeForm = "delta+phi"
    """What travels, see the module: delta+phi, or half the bytes, single_vector or theta_only."""
    prefetch_phi: bool = True
    """Send phi as soon as it is final, not with Delta."""
    codec: str = "none"
    """Form of Delta on the wire; a lossy one needs exchange = "delta+phi"."""
    anchor_codec: str = "none"
    """Form of phi on the wire: none, bf16, int8; a lossy one needs exchange = "delta+phi"."""
    on_peer_failure: Literal["raise", "solo"] = "raise"
    """Where a partner is lost or late: raise, or solo: go on alone in that round."""
    seed: int = 0
    """Seed of the groups."""

    def __post_init__(self) -> None:
        at_least("sync_every", self.sync_every, 1)
        positive_rate(self.outer_lr)
        momentum_in_range(self.outer_momentum)
        read_form(self.codec)  # refuses an unknown one
        refuse(PLAIN | {"mixing": "groups", "rule": "noloco", "codec": self.codec.partition(":")[0]})
        one_of("anchor_codec", self.anchor_codec, ("none", "bf16", "int8"))
        at_least("group_size", self.group_size, 2)
        at_least("gamma", self.pull, 0)
        one_of("exchange", self.exchange, get_args(ExchangeForm))
        one_of("on_peer_failure", self.on_peer_failure, ("raise", "solo"))
        if self.exchange != "delta+phi" and (self.codec, self.anchor_codec) != ("none", "none"):
            raise ValueError(f'exchange = {self.exchange!r} travels in full precision: lossy codecs want "delta+phi"')
        if self.exchange == "theta_only" and self.pull != self.outer_lr:
            raise ValueError(f'exchange = "theta_only" needs gamma = outer_lr, not {self.gamma}: leave gamma out')

    @property
    @override
    def survives(self) -> bool:
        return self.on_peer_failure == "solo"

    @property
    def pull(self) -> float:
        """gamma with its default."""
        return self.outer_lr if self.gamma is None else self.gamma


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
