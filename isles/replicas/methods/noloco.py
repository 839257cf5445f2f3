"""NoLoCo (Kolehmainen et al., 2025, arXiv 2506.10911): an outer step with one random partner, no collective at all.

    every m inner steps, in a new random group G of n workers (n = 2 in the paper):
        Delta_i = theta_i - phi_i
        delta_i <- alpha delta_i + beta mean_G Delta - gamma (phi_i - mean_G phi)
        phi_i   <- phi_i + delta_i
        theta_i <- phi_i

phi: anchor, theta: live weights, delta: outer momentum, all of worker i alone; alpha: outer_momentum, beta: outer_lr,
gamma: pull towards the group's anchors. Only the partner is waited for. A worker left over in an odd world does a round
alone: mean Delta is its own, no pull. Replicas stay slightly different; the inner learning rate's decay draws them
together. `exchange` says what travels: delta+phi (phi is final since the last round, so with prefetch_phi it travels
behind the inner steps), or half the bytes, by an exact reduction of it:

    single_vector   u = beta Delta + gamma phi travels:    delta <- alpha delta + mean u - gamma phi
    theta_only      theta travels, for gamma = beta:       delta <- alpha delta + beta (mean theta - phi)
    both            phi <- phi + delta

Both carry the small Delta inside the much larger phi, so they travel in full precision.

Deviations: + beta (the paper prints -, which climbs; its appendix and code have +). This is heavy ball although the
paper says Nesterov. The text gives no gamma; the authors' code uses beta. phi and delta are float32 whatever the
weights are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor
from typing_extensions import override

from isles.comm.codecs import codec, form
from isles.replicas.checks import at_least, group_fits, momentum_in_range, one_of, positive_rate
from isles.replicas.loop.outer import OuterConfig, OuterSync
from isles.replicas.parts.cadence import EveryH
from isles.replicas.parts.interfaces import Answer, Composition, OuterRule
from isles.replicas.parts.landing import Replace
from isles.replicas.parts.legal import PLAIN, refuse
from isles.replicas.parts.mixing import RandomGroups
from isles.replicas.parts.stability import warn_unless_stable

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
        refuse(PLAIN | {"mixing": "groups", "rule": "noloco", "codec": form(self.codec).name.partition(":")[0]})
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
class DeltaPhi(OuterRule):
    """delta <- alpha delta - beta mean g - gamma (phi - mean phi);  phi <- phi + delta;  with g = -Delta.

    The outer gradient g travels; the loop sends the anchor beside it.
    """

    name = "noloco"
    beta: float
    gamma: float
    vectors = ("momentum",)
    shares_anchors = True

    @override
    def apply(self, anchor: Tensor, answer: Answer, vectors: Mapping[str, Tensor], round: int) -> None:
        assert answer.anchors is not None and answer.own_anchor is not None
        delta, apart = vectors["momentum"], answer.anchors.sub_(answer.own_anchor)  # mean phi - phi
        delta.mul_(self.momentum).sub_(answer.mean, alpha=self.beta).add_(apart, alpha=self.gamma)
        anchor.add_(delta)


@dataclass(frozen=True, kw_only=True)
class SingleVector(DeltaPhi):
    """delta <- alpha delta + mean u - gamma phi;  phi <- phi + delta;  with u = gamma phi - beta g, which travels."""

    shares_anchors = False

    @override
    def form(self, out: Tensor, live: Tensor, reference: Tensor, anchor: Tensor) -> None:
        super().form(out, live, reference, anchor)
        out.mul_(-self.beta).add_(anchor, alpha=self.gamma)

    @override
    def apply(self, anchor: Tensor, answer: Answer, vectors: Mapping[str, Tensor], round: int) -> None:
        delta = vectors["momentum"]
        delta.mul_(self.momentum).add_(answer.mean.sub_(anchor, alpha=self.gamma))
        anchor.add_(delta)


@dataclass(frozen=True, kw_only=True)
class ThetaOnly(DeltaPhi):
    """delta <- alpha delta + beta (mean theta - phi);  phi <- phi + delta;  for gamma = beta."""

    shares_anchors = False

    @override
    def form(self, out: Tensor, live: Tensor, reference: Tensor, anchor: Tensor) -> None:
        """theta travels, as phi - g: equal to the live weights up to rounding, and free of their coarser dtype's
        error.
        """
        super().form(out, live, reference, anchor)
        out.neg_().add_(anchor)

    @override
    def apply(self, anchor: Tensor, answer: Answer, vectors: Mapping[str, Tensor], round: int) -> None:
        delta = vectors["momentum"]
        delta.mul_(self.momentum).add_(answer.mean.sub_(anchor), alpha=self.beta)
        anchor.add_(delta)


RULES = {"delta+phi": DeltaPhi, "single_vector": SingleVector, "theta_only": ThetaOnly}


class NoLoCo(OuterSync):
    """Under failure: with on_peer_failure = "solo" a lost or late partner costs this worker one
    round's averaging.
    """

    Config = NoLoCoConfig
    is_linear = True
    config: NoLoCoConfig

    @override
    def compose(self) -> Composition:
        config = self.config
        group_fits(config.group_size, self.group.size)
        warn_unless_stable(config.outer_momentum, config.pull, config.group_size)
        return Composition(
            cadence=EveryH(config.sync_every),
            mixing=RandomGroups(config.group_size, config.seed),
            codec=form(config.codec),
            anchor_codec=codec(config.anchor_codec),
            rule=RULES[config.exchange](beta=config.outer_lr, momentum=config.outer_momentum, gamma=config.pull),
            landing=Replace(),
            prefetch_anchors=config.prefetch_phi and config.exchange == "delta+phi",
            on_peer_failure=config.on_peer_failure,
        )
