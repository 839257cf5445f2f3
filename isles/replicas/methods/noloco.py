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

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from isles.comm.codecs import codec, form
from isles.replicas.config import group_fits
from isles.replicas.loop.outer import OuterSync
from isles.replicas.methods.config import NoLoCoConfig
from isles.replicas.parts.choices import EveryH, RandomGroups, Replace
from isles.replicas.parts.interfaces import Answer, Composition, OuterRule, RuleState
from isles.replicas.parts.quadratic import warn_unless_stable


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
    def apply(self, anchor: Tensor, answer: Answer, state: RuleState, round: int) -> None:
        assert answer.anchors is not None and answer.own_anchor is not None
        delta, apart = state.vectors["momentum"], answer.anchors.sub_(answer.own_anchor)  # mean phi - phi
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
    def apply(self, anchor: Tensor, answer: Answer, state: RuleState, round: int) -> None:
        delta = state.vectors["momentum"]
        delta.mul_(self.momentum).add_(answer.mean.sub_(anchor, alpha=self.gamma))
        anchor.add_(delta)


@dataclass(frozen=True, kw_only=True)
class ThetaOnly(DeltaPhi):
    """delta <- alpha delta + beta (mean theta - phi);  phi <- phi + delta;  for gamma = beta."""

    shares_anchors = False

    @override
    def form(self, out: Tensor, live: Tensor, reference: Tensor, anchor: Tensor) -> None:
        """theta travels, as phi - g: the live weights up to rounding, free of their coarser dtype's error."""
        super().form(out, live, reference, anchor)
        out.neg_().add_(anchor)

    @override
    def apply(self, anchor: Tensor, answer: Answer, state: RuleState, round: int) -> None:
        delta = state.vectors["momentum"]
        delta.mul_(self.momentum).add_(answer.mean.sub_(anchor), alpha=self.beta)
        anchor.add_(delta)


RULES = {"delta+phi": DeltaPhi, "single_vector": SingleVector, "theta_only": ThetaOnly}


class NoLoCo(OuterSync):
    """With on_peer_failure = "solo" a lost or late partner costs this worker one round's averaging."""

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
            codec=form(config.codec, config.options_of("codec")),
            anchor_codec=codec(config.anchor_codec),
            rule=RULES[config.exchange](beta=config.outer_lr, momentum=config.outer_momentum, gamma=config.pull),
            landing=Replace(),
            prefetch_anchors=config.prefetch_phi and config.exchange == "delta+phi",
            on_peer_failure=config.on_peer_failure,
        )
