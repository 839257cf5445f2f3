"""The settings of NoLoCo, with the paper's defaults; the symbols are those of `noloco`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from isles.comm.codecs import form
from isles.replicas.checks import at_least, momentum_in_range, one_of, positive_rate
from isles.replicas.parts.legal import PLAIN, refuse
from isles.replicas.sync import MethodConfig

Exchange = Literal["delta+phi", "single_vector", "theta_only"]


@dataclass(frozen=True, kw_only=True)
class NoLoCoConfig(MethodConfig):
    """Defaults of the paper, Table 1, and of its code. sync_every: inner steps a round (m). outer_lr: beta.
    outer_momentum: alpha. gamma: pull to the group's anchors; left out, it equals outer_lr. group_size: workers a group
    (n). exchange: what travels, see the module. prefetch_phi: send phi as soon as it is final, not with Delta. codec,
    anchor_codec: forms of Delta and phi on the wire; lossy ones need exchange = "delta+phi". on_peer_failure: raise, or
    solo: go on alone in a round whose partner is lost or late. seed: of the groups.
    """

    sync_every: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.5
    gamma: float | None = None
    group_size: int = 2
    exchange: Exchange = "delta+phi"
    prefetch_phi: bool = True
    codec: str = "none"
    anchor_codec: str = "none"
    on_peer_failure: Literal["raise", "solo"] = "raise"
    seed: int = 0

    def __post_init__(self) -> None:
        at_least("sync_every", self.sync_every, 1)
        positive_rate(self.outer_lr)
        momentum_in_range(self.outer_momentum)
        refuse(PLAIN | {"mixing": "groups", "rule": "noloco", "codec": form(self.codec).name.partition(":")[0]})
        one_of("anchor_codec", self.anchor_codec, ("none", "bf16", "int8"))
        at_least("group_size", self.group_size, 2)
        at_least("gamma", self.pull, 0)
        one_of("exchange", self.exchange, get_args(Exchange))
        one_of("on_peer_failure", self.on_peer_failure, ("raise", "solo"))
        if self.exchange != "delta+phi" and (self.codec, self.anchor_codec) != ("none", "none"):
            raise ValueError(f'exchange = {self.exchange!r} travels in full precision: lossy codecs want "delta+phi"')
        if self.exchange == "theta_only" and self.pull != self.outer_lr:
            raise ValueError(f'exchange = "theta_only" needs gamma = outer_lr, not {self.gamma}: leave gamma out')

    @property
    def survives(self) -> bool:
        """See MethodConfig.survives."""
        return self.on_peer_failure == "solo"

    @property
    def pull(self) -> float:
        """gamma with its default."""
        return self.outer_lr if self.gamma is None else self.gamma
