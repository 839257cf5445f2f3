"""An outer method of one's own by choosing its six parts: any cadence x mixing x codec x reading x rule x landing, each
of Isles' or a class of one's own.

Which go together is the table in `legal` (`isles methods --legal`). The named methods are points of this space: diloco
is the default one; reading eager with outer_delay = 1 is `eager`; mixing groups with rule noloco is `noloco`.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from isles.base.parts import make, names_code
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
from isles.replicas.parts.interfaces import Cadence, Composition, Mixing, OuterRule, feedback
from isles.replicas.parts.quadratic import warn_unless_stable


class Custom(OuterSync):
    """What it guarantees depends on the parts."""

    Config = CustomConfig
    config: CustomConfig

    @override
    def compose(self) -> Composition:
        config, filled = self.config, self.config.filled
        fragments = cut(self.model, config.fragments, config.layers_per_fragment)
        sent = form(config.codec, config.options_of("codec"))
        late = config.overlap_steps, config.outer_delay, config.first_sync, config.every_step_until
        landings = {"blend": Blend(filled("merge_alpha")), "carry": Carry(), "replace": Replace()}
        parts: dict[str, Any] = {
            "cadence": EveryH(config.sync_every, len(fragments), *late),
            "mixing": self._mixing(),
            "reading": Eager() if config.reading == "eager" else Received(),
            "rule": self._rule(sent),
            "landing": landings.get(config.landing),
        }
        own = {axis: name for axis in parts if names_code(axis, name := getattr(config, axis))}
        parts |= {axis: make(axis, name, config.options_of(axis)) for axis, name in own.items()}
        self._refuse_misfit(parts["cadence"], parts["mixing"], len(fragments))
        return Composition(
            **parts,
            codec=sent,
            fragments=fragments,
            feedback=feedback(config.error_feedback, config.feedback_decay),
            anchor_codec=codec(filled("anchor_codec")) if parts["rule"].shares_anchors else None,
            prefetch_anchors=parts["rule"].shares_anchors,
        )

    @override
    def advise(self, steps: int) -> list[str]:
        if self.config.cadence is not None and not any(self.cadence.sends(step) for step in range(1, steps + 1)):
            raise ValueError(f'cadence = "{self.config.cadence}": nothing is sent in a run of {steps} steps')
        if self.config.reading != "eager":
            return super().advise(steps)
        rate, momentum = self.config.filled("outer_lr"), self.config.filled("outer_momentum")
        return super().advise(steps) + eager_rate(rate, momentum, self.group.size)

    def _refuse_misfit(self, cadence: Cadence, mixing: Mixing, fragments: int) -> None:
        """ValueError where a cadence of one's own is of other fragments, or workers would wait for ever, for a mixing
        of one's own puts them into groups that they do not agree on.
        """
        config, size = self.config, self.group.size
        if cadence.fragments != fragments:
            raise ValueError(
                f'cadence = "{config.cadence}" is of {cadence.fragments} fragments; fragments = {config.fragments!r} '
                f"cuts this model into {fragments}: change fragments, layers_per_fragment or options.cadence"
            )
        seen: set[int] = set() if names_code("mixing", config.mixing) else {*range(size)}
        for position in range(size):
            if position in seen:
                continue
            group = mixing.members(1, size, position)
            is_group = isinstance(group, tuple) and position in group and group == tuple(sorted(group))
            if not is_group or any(mixing.members(1, size, other) != group for other in group):
                raise ValueError(
                    f'mixing = "{config.mixing}": members(1, {size}, {position}) is {group!r}; give all members of a '
                    "group the same ascending tuple of positions, themselves included"
                )
            seen.update(group)

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
