"""An outer method of one's own by choosing its six parts: any cadence x mixing x codec x reading x rule x landing.

Which go together is the table in `legal` (`isles methods --legal`). The named methods are points of this space: diloco
is the default one; reading eager with outer_delay = 1 is `eager`; mixing groups with rule noloco is `noloco`.
"""

from __future__ import annotations

from isles.comm.codecs import codec, form
from isles.replicas.checks import eager_rate, group_fits, uneven_fragments
from isles.replicas.custom_config import CustomConfig
from isles.replicas.loop.fragments import cut
from isles.replicas.loop.outer import OuterSync
from isles.replicas.methods.diloco import Nesterov
from isles.replicas.methods.fedavg import Descent
from isles.replicas.methods.localsgd import Average
from isles.replicas.methods.noloco import DeltaPhi
from isles.replicas.methods.slowmo import HeavyBall
from isles.replicas.methods.sparta import AveragePart
from isles.replicas.parts.cadence import EveryH
from isles.replicas.parts.feedback import feedback
from isles.replicas.parts.interfaces import Composition, Landing, Mixing, OuterRule, Reading
from isles.replicas.parts.landing import Blend, Carry, Replace
from isles.replicas.parts.mixing import Everyone, Nobody, RandomGroups
from isles.replicas.parts.reading import Eager, Received
from isles.replicas.parts.stability import warn_unless_stable


class Custom(OuterSync):
    """See the module. What it guarantees depends on the parts."""

    Config = CustomConfig
    config: CustomConfig

    def compose(self) -> Composition:
        """See OuterSync.compose."""
        config = self.config
        fragments = cut(self.model, config.fragments, config.layers_per_fragment)
        rule = self._rule()
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
            reading=self._reading(),
            rule=rule,
            landing=self._landing(),
            fragments=fragments,
            feedback=feedback(config.error_feedback, config.feedback_decay),
            anchor_codec=codec(config.anchors) if rule.shares_anchors else None,
            prefetch_anchors=rule.shares_anchors,
        )

    def advise(self, steps: int) -> list[str]:
        """See ReplicaSync.advise."""
        config, notices = self.config, super().advise(steps)
        if config.reading == "eager":
            notices += eager_rate(config.rate, self.group.size)
        return notices + uneven_fragments(config.sync_every, len(self.fragments))

    def _mixing(self) -> Mixing:
        config = self.config
        if config.mixing != "groups":
            return Everyone() if config.mixing == "all" else Nobody()
        group_fits(config.groups_of, self.group.size)
        if config.rule == "noloco":
            warn_unless_stable(config.momentum, config.pull, config.groups_of)
        return RandomGroups(config.groups_of, config.seed)

    def _reading(self) -> Reading:
        return Eager() if self.config.reading == "eager" else Received()

    def _rule(self) -> OuterRule:
        config = self.config
        match config.rule:
            case "average":
                return AveragePart() if config.codec.startswith("randk") else Average()
            case "sgd":
                return Descent(lr=config.rate)
            case "nesterov":
                return Nesterov(lr=config.rate, momentum=config.momentum)
            case "heavy_ball":
                return HeavyBall(lr=config.rate, momentum=config.momentum)
        return DeltaPhi(beta=config.rate, momentum=config.momentum, gamma=config.pull)

    def _landing(self) -> Landing:
        if self.config.landing == "blend":
            return Blend(self.config.blend)
        return Carry() if self.config.landing == "carry" else Replace()
