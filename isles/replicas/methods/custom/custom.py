"""An outer method of one's own by choosing its six parts: any cadence x mixing x codec x reading x rule x landing, each
of Isles' or a class of one's own.

Which go together is the table in `legal` (`isles methods --legal`). The named methods are points of this space: diloco
is the default one; reading eager with outer_delay = 1 is `eager`; mixing groups with rule noloco is `noloco`.
"""

from __future__ import annotations

from typing_extensions import override

from isles.base.part_maker import make
from isles.base.parts import names_code
from isles.comm.codecs import codec, form
from isles.comm.codecs.lowrank import Form
from isles.replicas.config import eager_rate, group_fits
from isles.replicas.loop.fragment import cut
from isles.replicas.loop.outer import OuterSync
from isles.replicas.methods.custom.config import CustomConfig
from isles.replicas.methods.diloco import Nesterov
from isles.replicas.methods.fedavg import Descent
from isles.replicas.methods.localsgd import Average
from isles.replicas.methods.noloco import DeltaPhi
from isles.replicas.methods.slowmo import HeavyBall
from isles.replicas.methods.sparta import AveragePart
from isles.replicas.parts.choices import Blend, Carry, Eager, EveryH, Everyone, Nobody, RandomGroups, Received, Replace
from isles.replicas.parts.interfaces import Cadence, Composition, Landing, Mixing, OuterRule, feedback
from isles.replicas.parts.stability import warn_unless_stable


class Custom(OuterSync):
    """What it guarantees depends on the parts."""

    Config = CustomConfig
    config: CustomConfig

    @override
    def compose(self) -> Composition:
        config, filled = self.config, self.config.filled
        named = {axis: getattr(config, axis) for axis in config.own_axes}
        own = {axis: make(axis, it, config.options_of(axis)) for axis, it in named.items() if names_code(axis, it)}
        fragments = cut(self.model, config.fragments, config.layers_per_fragment)
        cadence: Cadence = own["cadence"] if "cadence" in own else self._cadence(len(fragments))
        mixing: Mixing = own["mixing"] if "mixing" in own else self._mixing()
        _fit(config, cadence, len(fragments))
        _refuse_one_sided(config, mixing, self.group.size)
        sent = own["codec"] if "codec" in own else form(config.codec)
        rule: OuterRule = own["rule"] if "rule" in own else self._rule(sent)
        landings: dict[str, Landing] = {"blend": Blend(filled("merge_alpha")), "carry": Carry(), "replace": Replace()}
        return Composition(
            cadence=cadence,
            mixing=mixing,
            codec=sent,
            reading=own.get("reading") or (Eager() if config.reading == "eager" else Received()),
            rule=rule,
            landing=own.get("landing") or landings[config.landing],
            fragments=fragments,
            feedback=feedback(config.error_feedback, config.feedback_decay),
            anchor_codec=codec(filled("anchor_codec")) if rule.shares_anchors else None,
            prefetch_anchors=rule.shares_anchors,
        )

    @override
    def advise(self, steps: int) -> list[str]:
        if self.config.cadence is not None and not any(self.cadence.sends(step) for step in range(1, steps + 1)):
            raise ValueError(f'cadence = "{self.config.cadence}": nothing is sent in a run of {steps} steps')
        if self.config.reading != "eager":
            return super().advise(steps)
        rate, momentum = self.config.filled("outer_lr"), self.config.filled("outer_momentum")
        return super().advise(steps) + eager_rate(rate, momentum, self.group.size)

    def _cadence(self, fragments: int) -> Cadence:
        config = self.config
        return EveryH(
            config.sync_every,
            fragments,
            config.overlap_steps,
            config.outer_delay,
            config.first_sync,
            config.every_step_until,
        )

    def _mixing(self) -> Mixing:
        config, filled = self.config, self.config.filled
        if config.mixing != "groups":
            return Everyone() if config.mixing == "all" else Nobody()
        group_fits(filled("group_size"), self.group.size)
        if config.rule == "noloco":
            warn_unless_stable(filled("outer_momentum"), filled("gamma"), filled("group_size"))
        return RandomGroups(filled("group_size"), config.seed)

    def _rule(self, sent: Form) -> OuterRule:
        lr, momentum = self.config.filled("outer_lr"), self.config.filled("outer_momentum")
        match self.config.rule:
            case "average":
                return AveragePart() if sent.shared_mask else Average()
            case "sgd":
                return Descent(lr=lr)
            case "nesterov":
                return Nesterov(lr=lr, momentum=momentum)
            case "heavy_ball":
                return HeavyBall(lr=lr, momentum=momentum)
        return DeltaPhi(beta=lr, momentum=momentum, gamma=self.config.filled("gamma"))


def _fit(config: CustomConfig, cadence: Cadence, fragments: int) -> None:
    """ValueError where the model is cut into another number of fragments than a cadence of one's own sends."""
    if cadence.fragments != fragments:
        raise ValueError(
            f'cadence = "{config.cadence}" is of {cadence.fragments} fragments, and fragments = {config.fragments!r} '
            f"cuts this model into {fragments}: change fragments, layers_per_fragment or options.cadence"
        )


def _refuse_one_sided(config: CustomConfig, mixing: Mixing, size: int) -> None:
    """ValueError where workers of a mixing of one's own do not agree on their groups, and would wait for ever."""
    for position in range(size) if names_code("mixing", config.mixing) else ():
        group = mixing.members(1, size, position)
        alike = isinstance(group, tuple) and position in group and group == tuple(sorted(group))
        if not alike or any(mixing.members(1, size, other) != group for other in group):
            raise ValueError(
                f'mixing = "{config.mixing}": members(1, {size}, {position}) is {group!r}; give all members of a group '
                "the same ascending tuple of positions, themselves included"
            )
