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
behind the inner steps), or one of the equal forms with half the bytes of `noloco_forms`.

Deviations: + beta (the paper prints -, which climbs; its appendix and code have +). This is heavy ball although the
paper says Nesterov. The text gives no gamma; the authors' code uses beta. phi and delta are float32 whatever the
weights are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from isles.comm.codecs import codec, form
from isles.replicas.checks import group_fits
from isles.replicas.loop.outer import OuterSync
from isles.replicas.noloco_config import NoLoCoConfig
from isles.replicas.noloco_forms import SingleVector, ThetaOnly
from isles.replicas.parts.cadence import EveryH
from isles.replicas.parts.interfaces import Answer, Composition, OuterRule, outer_gradient
from isles.replicas.parts.landing import Replace
from isles.replicas.parts.mixing import RandomGroups
from isles.replicas.parts.stability import warn_unless_stable


@dataclass(frozen=True, kw_only=True)
class DeltaPhi(OuterRule):
    """delta <- alpha delta - beta mean g - gamma (phi - mean phi);  phi <- phi + delta;  with g = -Delta."""

    name = "noloco"
    beta: float
    gamma: float
    vectors = ("momentum",)
    shares_anchors = True

    def form(self, out: Tensor, live: Tensor, reference: Tensor, anchor: Tensor) -> None:
        """The outer gradient g travels; the loop sends the anchor beside it."""
        outer_gradient(out, live, reference)

    def apply(self, anchor: Tensor, answer: Answer, vectors: Mapping[str, Tensor]) -> None:
        """See the class."""
        assert answer.anchors is not None and answer.own_anchor is not None
        delta, apart = vectors["momentum"], answer.anchors.sub_(answer.own_anchor)  # mean phi - phi
        delta.mul_(self.momentum).sub_(answer.mean, alpha=self.beta).add_(apart, alpha=self.gamma)
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
