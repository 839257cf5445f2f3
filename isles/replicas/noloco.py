"""NoLoCo (Kolehmainen et al., 2025, arXiv 2506.10911): an outer step with one random partner, no collective at all.

    every m inner steps, in a new random group G of n workers (n = 2 in the paper):
        Delta_i = theta_i - phi_i
        delta_i <- alpha delta_i + beta mean_G Delta - gamma (phi_i - mean_G phi)
        phi_i   <- phi_i + delta_i
        theta_i <- phi_i

phi: anchor, theta: live weights, delta: outer momentum, all of worker i alone; alpha: outer_momentum, beta: outer_lr,
gamma: pull
towards the group's anchors. Only the partner is waited for. A worker left over in an odd world does a round alone
(mean Delta = its own,
no pull). Replicas stay slightly different; the inner learning rate's decay draws them together.

Deviations: the sign of beta is + (the paper prints -, which climbs; its appendix and code have +). This is heavy ball
although the paper
says Nesterov. gamma: the text gives no value, the authors' code uses beta. phi and delta are float32 whatever the
weights are.

`exchange` says what travels; for the same settings the result is the same up to rounding:
    delta+phi      Delta, and phi: final since the last round, so with prefetch_phi it travels behind the inner steps
    single_vector  u = beta Delta + gamma phi, half the bytes:     delta <- alpha delta + mean u - gamma phi
    theta_only     theta, half the bytes, needs gamma = beta:      delta <- alpha delta + beta (mean theta - phi)
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from isles.comm.codecs import codec
from isles.replicas.cadence import EveryH
from isles.replicas.checks import known_codec, momentum_in_range, positive_rate, positive_steps, rounds_for_momentum
from isles.replicas.landing import Replace
from isles.replicas.mixing import RandomGroups
from isles.replicas.outer import OuterSync
from isles.replicas.parts import Answer, Composition, outer_gradient
from isles.replicas.stability import largest_gamma, radius
from isles.replicas.sync import MethodConfig


@dataclass(frozen=True, kw_only=True)
class NoLoCoConfig(MethodConfig):
    """Defaults of the paper, Table 1, and of its code.

    gamma None: equal to outer_lr. codec, anchor_codec: forms of Delta and phi on the wire (a lossy one needs exchange
    = "delta+phi").
    on_peer_failure: raise, or solo: go on alone in a round whose partner is lost or late. seed: of the groups.
    """

    sync_every: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.5
    gamma: float | None = None
    group_size: int = 2
    exchange: Literal["delta+phi", "single_vector", "theta_only"] = "delta+phi"
    prefetch_phi: bool = True
    codec: str = "none"
    anchor_codec: str = "none"
    on_peer_failure: Literal["raise", "solo"] = "raise"
    seed: int = 0

    def __post_init__(self) -> None:
        positive_steps(self.sync_every)
        positive_rate(self.outer_lr)
        momentum_in_range(self.outer_momentum)
        known_codec("codec", self.codec)
        known_codec("anchor_codec", self.anchor_codec, allowed=("none", "bf16", "int8"))
        if self.group_size < 2:
            raise ValueError(f"group_size = {self.group_size}: choose 2 (pairs) or more")
        if self.gamma is not None and self.gamma < 0:
            raise ValueError(f"gamma = {self.gamma}: choose 0 or more (default: outer_lr)")
        if self.exchange not in RULES:
            raise ValueError(f"exchange = {self.exchange!r}: choose one of {', '.join(RULES)}")
        if self.on_peer_failure not in ("raise", "solo"):
            raise ValueError(f"on_peer_failure = {self.on_peer_failure!r}: choose raise or solo")
        if self.exchange != "delta+phi" and (self.codec, self.anchor_codec) != ("none", "none"):
            raise ValueError(
                f'exchange = {self.exchange!r} travels in full precision only: use exchange = "delta+phi" with a lossy codec'
            )
        if self.exchange == "theta_only" and self.pull != self.outer_lr:
            raise ValueError(
                f'exchange = "theta_only" needs gamma = outer_lr ({self.outer_lr}), not {self.gamma}: leave gamma out'
            )

    @property
    def pull(self) -> float:
        """gamma with its default."""
        return self.outer_lr if self.gamma is None else self.gamma


@dataclass(frozen=True, slots=True)
class DeltaPhi:
    """delta <- alpha delta - beta mean g - gamma (phi - mean phi);  phi <- phi + delta;  with g = -Delta."""

    beta: float
    alpha: float
    gamma: float
    vectors: tuple[str, ...] = ("momentum",)
    shares_anchors: bool = True

    def form(self, out: Tensor, live: Tensor, reference: Tensor, anchor: Tensor) -> None:
        """The outer gradient g travels; the loop sends the anchor beside it."""
        outer_gradient(out, live, reference)

    def apply(self, anchor: Tensor, answer: Answer, vectors: Mapping[str, Tensor]) -> None:
        """See the class."""
        assert answer.anchors is not None
        delta, apart = vectors["momentum"], answer.anchors.sub_(anchor)  # mean phi - phi
        delta.mul_(self.alpha).sub_(answer.mean, alpha=self.beta).add_(apart, alpha=self.gamma)
        anchor.add_(delta)


@dataclass(frozen=True, slots=True)
class SingleVector:
    """delta <- alpha delta + mean u - gamma phi;  phi <- phi + delta;  with u = gamma phi - beta g."""

    beta: float
    alpha: float
    gamma: float
    vectors: tuple[str, ...] = ("momentum",)
    shares_anchors: bool = False

    def form(self, out: Tensor, live: Tensor, reference: Tensor, anchor: Tensor) -> None:
        """u travels."""
        outer_gradient(out, live, reference)
        out.mul_(-self.beta).add_(anchor, alpha=self.gamma)

    def apply(self, anchor: Tensor, answer: Answer, vectors: Mapping[str, Tensor]) -> None:
        """See the class."""
        delta = vectors["momentum"]
        delta.mul_(self.alpha).add_(answer.mean.sub_(anchor, alpha=self.gamma))
        anchor.add_(delta)


@dataclass(frozen=True, slots=True)
class ThetaOnly:
    """delta <- alpha delta + beta (mean theta - phi);  phi <- phi + delta;  for gamma = beta."""

    beta: float
    alpha: float
    gamma: float
    vectors: tuple[str, ...] = ("momentum",)
    shares_anchors: bool = False

    def form(self, out: Tensor, live: Tensor, reference: Tensor, anchor: Tensor) -> None:
        """theta travels, as phi - g: equal to the live weights up to rounding, and free of their coarser dtype's
        error.
        """
        outer_gradient(out, live, reference)
        out.neg_().add_(anchor)

    def apply(self, anchor: Tensor, answer: Answer, vectors: Mapping[str, Tensor]) -> None:
        """See the class."""
        delta = vectors["momentum"]
        delta.mul_(self.alpha).add_(answer.mean.sub_(anchor), alpha=self.beta)
        anchor.add_(delta)


RULES = {"delta+phi": DeltaPhi, "single_vector": SingleVector, "theta_only": ThetaOnly}


class NoLoCo(OuterSync):
    """See the module. Under failure: with on_peer_failure = "solo" a lost or late partner costs this worker one
    round's averaging.
    """

    Config = NoLoCoConfig
    config: NoLoCoConfig

    def compose(self) -> Composition:
        """See OuterSync.compose."""
        config = self.config
        if radius(config.outer_momentum, config.pull, config.group_size) > 1 - 1e-9:
            bound = largest_gamma(config.outer_momentum, config.group_size)
            warnings.warn(
                f"gamma = {config.pull:g} with outer_momentum = {config.outer_momentum:g} lets replicas drift apart in large worlds: "
                f"choose 0 < gamma < {bound:.3g}",
                stacklevel=2,
            )
        return Composition(
            cadence=EveryH(config.sync_every),
            mixing=RandomGroups(config.group_size, config.seed),
            codec=codec(config.codec),
            anchor_codec=codec(config.anchor_codec),
            rule=RULES[config.exchange](config.outer_lr, config.outer_momentum, config.pull),
            landing=Replace(),
            prefetch_anchors=config.prefetch_phi and config.exchange == "delta+phi",
            on_peer_failure=config.on_peer_failure,
        )

    def advise(self, steps: int) -> list[str]:
        """See ReplicaSync.advise."""
        return super().advise(steps) + rounds_for_momentum(steps // self.config.sync_every, self.config.outer_momentum)
