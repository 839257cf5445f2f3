"""The settings of `custom`: one choice an axis of `parts.legal`, or a class of your own. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from isles.base.parts import CODE, names_code, one_of_or_code
from isles.replicas.config import (
    CompressedConfig,
    Dimension,
    FirstSync,
    FragmentedConfig,
    at_least,
    check_fragments,
    momentum_in_range,
    one_of,
    positive_rate,
)
from isles.replicas.parts.legal import AXES, OWN, refuse

WITH_RATE = ("sgd", "nesterov", "heavy_ball", "noloco")
ACTS_ON: dict[str, tuple[str, tuple[str, ...]]] = {
    "group_size": ("mixing", ("groups",)),
    "outer_lr": ("rule", WITH_RATE),
    "outer_momentum": ("rule", ("nesterov", "heavy_ball", "noloco")),
    "gamma": ("rule", ("noloco",)),
    "anchor_codec": ("rule", ("noloco",)),
    "merge_alpha": ("landing", ("blend",)),
}
"""Settings that only some members of an axis ask for."""
BY_STEPS = ("sync_every", "overlap_steps", "outer_delay", "first_sync", "every_step_until")
"""Settings of the cadence that is none of one's own."""
USUAL = {"group_size": 2, "outer_lr": 1.0, "outer_momentum": 0.0, "anchor_codec": "none", "merge_alpha": 0.5}
DEFAULTS: dict[str, dict[str, float]] = {
    "nesterov": {"outer_lr": 0.7, "outer_momentum": 0.9},
    "heavy_ball": {"outer_momentum": 0.5},
    "noloco": {"outer_lr": 0.7, "outer_momentum": 0.5},
}


@dataclass(frozen=True, kw_only=True)
class CustomConfig(FragmentedConfig, CompressedConfig):
    """Settings of `custom`: one choice an axis, and what the chosen members want to know. What is left out takes the
    default of the method that the member comes from. Each choice may be a class of your own, package.module:Class.
    """

    cadence: str | None = None
    """When fragments are sent and land, package.module:Class; left out, the next five say it."""
    sync_every: int = 50
    """Inner steps a round (H)."""
    overlap_steps: int = 0
    """Inner steps after which the answer to a fragment lands, below sync_every; 0: at once."""
    outer_delay: int = 0
    """Rounds that an answer comes late; 0: see overlap_steps."""
    first_sync: FirstSync = "full_window"
    """When a fragment is first sent: "full_window", after H steps; "offset", at its own offset."""
    every_step_until: int = 0
    """Last inner step of a first phase that exchanges after each."""
    mixing: str = "all"
    """With whom: all, groups (random ones, new each round), nobody, or package.module:Class."""
    group_size: int | None = None
    """Workers a group; left out, 2."""
    seed: int = 0
    """Seed of the groups."""
    reading: str = "received"
    """What counts of an answer: received (all of it), eager (the own stale share replaced by the fresh one), or
    package.module:Class.
    """
    rule: str = "nesterov"
    """What an answer does to the anchor: average, sgd, nesterov, heavy_ball, noloco, or package.module:Class."""
    outer_lr: float | None = None
    """The rule's rate; left out, its method's."""
    outer_momentum: float | None = None
    """The rule's momentum; left out, its method's."""
    gamma: float | None = None
    """Pull to the anchors of the group; left out, outer_lr."""
    anchor_codec: str | None = None
    """Form of anchors on the wire: none, bf16, int8; left out, none."""
    landing: str = "replace"
    """What the anchor does to the live weights: replace, blend, carry, or package.module:Class."""
    merge_alpha: float | None = None
    """The live weights' share where they blend; left out, 0.5."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for axis in ("mixing", "reading", "rule", "landing"):
            one_of_or_code(axis, getattr(self, axis), AXES[axis])
        if self.cadence is not None:
            one_of_or_code("cadence", self.cadence, ())
            for key in BY_STEPS:
                if (value := getattr(self, key)) != getattr(CustomConfig, key):
                    both = f'{key} = {value} and cadence = "{self.cadence}"'
                    raise ValueError(f"{both} both say when to exchange: leave one of them out")
        check_fragments(self.fragments, self.layers_per_fragment, self.first_sync)
        refuse(self.choice)
        for setting, (axis, members) in ACTS_ON.items():
            value, chosen = getattr(self, setting), getattr(self, axis)
            if value is not None and chosen not in members:
                mend = f"choose {axis} = {' or '.join(members)}"
                if names_code(axis, chosen):
                    mend = f"give it to that class in [replicas.options.{axis}]"
                raise ValueError(
                    f'{setting} = {value} has nothing to act on with {axis} = "{chosen}": leave it out, or {mend}'
                )
        self._check_numbers()

    def _check_numbers(self) -> None:
        at_least("sync_every", self.sync_every, 1)
        at_least("outer_delay", self.outer_delay, 0)
        at_least("group_size", self.filled("group_size"), 2)
        if not 0 <= self.overlap_steps < self.sync_every:
            raise ValueError(f"overlap_steps = {self.overlap_steps}: choose 0 to {self.sync_every - 1}")
        if self.overlap_steps and self.outer_delay:
            raise ValueError("overlap_steps and outer_delay both say when an answer lands: set one of them")
        if self.every_step_until and (self.overlap_steps or self.outer_delay):
            raise ValueError("every_step_until wants answers at once: leave out overlap_steps and outer_delay")
        at_least("every_step_until", self.every_step_until, 0)
        if self.rule in WITH_RATE:
            positive_rate(self.filled("outer_lr"))
            momentum_in_range(self.filled("outer_momentum"))
        at_least("gamma", self.filled("gamma"), 0)
        one_of("anchor_codec", self.filled("anchor_codec"), ("none", "bf16", "int8"))
        if not 0 <= self.filled("merge_alpha") <= 1:
            raise ValueError(f"merge_alpha = {self.merge_alpha}: choose the local weights' share, 0 to 1")

    @property
    def choice(self) -> dict[str, str]:
        """The member of each axis, see `legal`."""
        cut = not isinstance(self.fragments, str) or self.fragments != "whole"
        at_once = "fragments" if cut else "every_h"
        late = "one_round" if self.outer_delay == 1 else "more_rounds" if self.outer_delay > 1 else None
        chosen = {axis: getattr(self, axis) for axis in ("mixing", "error_feedback", "reading", "rule", "landing")}
        chosen |= {"cadence": late or ("overlap" if self.overlap_steps else at_once)}
        chosen |= {"codec": self.codec.partition(":")[0]}
        return chosen | {axis: OWN for axis in chosen if axis in CODE and names_code(axis, getattr(self, axis))}

    @override
    def space(self, steps: int, *, timed: bool) -> list[Dimension]:
        found = super().space(steps, timed=timed)
        return [one for one in found if self.cadence is None or one.name != "replicas.sync_every"]

    def filled(self, setting: str) -> Any:
        value = getattr(self, setting)
        if value is None and setting == "gamma":
            return self.filled("outer_lr")
        return DEFAULTS.get(self.rule, {}).get(setting, USUAL[setting]) if value is None else value
