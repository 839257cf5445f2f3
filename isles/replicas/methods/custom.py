"""An outer method of one's own by choosing its six parts: any cadence x mixing x codec x reading x rule x landing.

Which go together is the table in `legal` (`isles methods --legal`). The named methods are points of this space: diloco
is the default one; reading eager with outer_delay = 1 is `eager`; mixing groups with rule noloco is `noloco`.
"""

from __future__ import annotations

from typing_extensions import override

from isles.comm.codecs import codec, form
from isles.replicas.config import eager_rate, group_fits
from isles.replicas.loop.fragment import cut
from isles.replicas.loop.outer import OuterSync
from isles.replicas.methods.config import CustomConfig
from isles.replicas.methods.diloco import Nesterov
from isles.replicas.methods.fedavg import Descent
from isles.replicas.methods.localsgd import Average
from isles.replicas.methods.noloco import DeltaPhi
from isles.replicas.methods.slowmo import HeavyBall
from isles.replicas.methods.sparta import AveragePart
from isles.replicas.parts.choices import Blend, Carry, Eager, EveryH, Everyone, Nobody, RandomGroups, Received, Replace
from isles.replicas.parts.interfaces import Composition, Landing, Mixing, OuterRule, feedback
from isles.replicas.parts.stability import warn_unless_stable


class Custom(OuterSync):
    """What it guarantees depends on the parts."""

    Config = CustomConfig
    config: CustomConfig

    @override
    def compose(self) -> Composition:
        config, filled = self.config, self.config.filled
        fragments = cut(self.model, config.fragments, config.layers_per_fragment)
        rule = self._rule()
        landings: dict[str, Landing] = {"blend": Blend(filled("merge_alpha")), "carry": Carry(), "replace": Replace()}
        return Composition(
            cadence=EveryH(
                config.sync_every,
                len(fragments),
                config.overlap_steps,
                config.outer_delay,
                config.first_sync,
                config.every_step_until,
            ),
            mixing=self._mixing(),
            codec=form(config.codec),
            reading=Eager() if config.reading == "eager" else Received(),
            rule=rule,
            landing=landings[config.landing],
            fragments=fragments,
            feedback=feedback(config.error_feedback, config.feedback_decay),
            anchor_codec=codec(filled("anchor_codec")) if rule.shares_anchors else None,
            prefetch_anchors=rule.shares_anchors,
        )

    @override
    def advise(self, steps: int) -> list[str]:
        if self.config.reading != "eager":
            return super().advise(steps)
        rate, momentum = self.config.filled("outer_lr"), self.config.filled("outer_momentum")
        return super().advise(steps) + eager_rate(rate, momentum, self.group.size)

    def _mixing(self) -> Mixing:
        config, filled = self.config, self.config.filled
        if config.mixing != "groups":
            return Everyone() if config.mixing == "all" else Nobody()
        group_fits(filled("group_size"), self.group.size)
        if config.rule == "noloco":
            warn_unless_stable(filled("outer_momentum"), filled("gamma"), filled("group_size"))
        return RandomGroups(filled("group_size"), config.seed)

    def _rule(self) -> OuterRule:
        lr, momentum = self.config.filled("outer_lr"), self.config.filled("outer_momentum")
        match self.config.rule:
            case "average":
                return AveragePart() if form(self.config.codec).shared_mask else Average()
            case "sgd":
                return Descent(lr=lr)
            case "nesterov":
                return Nesterov(lr=lr, momentum=momentum)
            case "heavy_ball":
                return HeavyBall(lr=lr, momentum=momentum)
        return DeltaPhi(beta=lr, momentum=momentum, gamma=self.config.filled("gamma"))
