"""The settings of `custom`: one choice an axis, and what the chosen members want to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from isles.comm.codecs import form
from isles.replicas.checks import at_least, momentum_in_range, one_of, positive_rate
from isles.replicas.loop.fragments import FirstSync, Fragments, check_fragments
from isles.replicas.parts.feedback import Feedback, check_feedback
from isles.replicas.parts.legal import AXES, refuse
from isles.replicas.sync import MethodConfig

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
DEFAULTS: dict[str, dict[str, float]] = {
    "sgd": {"outer_lr": 1.0},
    "nesterov": {"outer_lr": 0.7, "outer_momentum": 0.9},
    "heavy_ball": {"outer_lr": 1.0, "outer_momentum": 0.5},
    "noloco": {"outer_lr": 0.7, "outer_momentum": 0.5},
}


@dataclass(frozen=True, kw_only=True)
class CustomConfig(MethodConfig):
    """sync_every: inner steps a round (H). fragments, layers_per_fragment, overlap_steps, first_sync: as in Streaming
    DiLoCo; "whole": the model at a time. outer_delay: rounds that an answer comes late; 0: see overlap_steps.
    every_step_until: last inner step of a first phase that exchanges after each. mixing: with whom: all, groups (random
    ones, new each round), nobody. group_size: workers a group; left out, 2. seed: of the groups. codec, error_feedback,
    feedback_decay: as in DiLoCo. reading: received, or eager (the own stale share replaced by the fresh one). rule:
    what an answer does to the anchor: average, sgd, nesterov, heavy_ball, noloco. outer_lr, outer_momentum, gamma,
    anchor_codec: of the rule; left out, those of its method. landing: what the anchor does to the live weights:
    replace, blend, carry. merge_alpha: the live weights' share where they blend; left out, 0.5.
    """

    sync_every: int = 50
    fragments: Fragments = "whole"
    layers_per_fragment: int | None = None
    overlap_steps: int = 0
    outer_delay: int = 0
    first_sync: FirstSync = "full_window"
    every_step_until: int = 0
    mixing: str = "all"
    group_size: int | None = None
    seed: int = 0
    codec: str = "none"
    error_feedback: Feedback = "none"
    feedback_decay: float = 1.0
    reading: str = "received"
    rule: str = "nesterov"
    outer_lr: float | None = None
    outer_momentum: float | None = None
    gamma: float | None = None
    anchor_codec: str | None = None
    landing: str = "replace"
    merge_alpha: float | None = None

    def __post_init__(self) -> None:
        for axis in ("mixing", "reading", "rule", "landing"):
            one_of(axis, getattr(self, axis), AXES[axis])
        form(self.codec)  # refuses an unknown one
        check_feedback(self.error_feedback, self.feedback_decay)
        check_fragments(self.fragments, self.layers_per_fragment, self.first_sync)
        refuse(self.choice)
        for setting, (axis, members) in ACTS_ON.items():
            given, member = getattr(self, setting), getattr(self, axis)
            if given is not None and member not in members:
                raise ValueError(
                    f'{setting} = {given} has nothing to act on with {axis} = "{member}": leave it out, or choose '
                    f"{axis} = {' or '.join(members)}"
                )
        self._check_numbers()

    def _check_numbers(self) -> None:
        at_least("sync_every", self.sync_every, 1)
        at_least("outer_delay", self.outer_delay, 0)
        at_least("group_size", self.groups_of, 2)
        if not 0 <= self.overlap_steps < self.sync_every:
            raise ValueError(f"overlap_steps = {self.overlap_steps}: choose 0 to {self.sync_every - 1}")
        if self.overlap_steps and self.outer_delay:
            raise ValueError("overlap_steps and outer_delay both say when an answer lands: set one of them")
        if self.every_step_until and (self.overlap_steps or self.outer_delay):
            raise ValueError("every_step_until wants answers at once: leave out overlap_steps and outer_delay")
        at_least("every_step_until", self.every_step_until, 0)
        if self.rule in WITH_RATE:
            positive_rate(self.rate)
            momentum_in_range(self.momentum)
        at_least("gamma", self.pull, 0)
        one_of("anchor_codec", self.anchors, ("none", "bf16", "int8"))
        if not 0 <= self.blend <= 1:
            raise ValueError(f"merge_alpha = {self.merge_alpha}: choose the local weights' share, 0 to 1")

    @property
    def choice(self) -> Mapping[str, str]:
        """The member of each axis, see `legal`."""
        cut = not isinstance(self.fragments, str) or self.fragments != "whole"
        at_once = "fragments" if cut else "every_h"
        late = "one_round" if self.outer_delay == 1 else "more_rounds" if self.outer_delay > 1 else None
        own = {axis: getattr(self, axis) for axis in ("mixing", "error_feedback", "reading", "rule", "landing")}
        kind = self.codec.partition(":")[0]
        return {"cadence": late or ("overlap" if self.overlap_steps else at_once), "codec": kind, **own}

    # What was left out, filled in.

    @property
    def groups_of(self) -> int:
        """Workers a group."""
        return 2 if self.group_size is None else self.group_size

    @property
    def rate(self) -> float:
        """The outer learning rate."""
        return DEFAULTS.get(self.rule, {}).get("outer_lr", 1.0) if self.outer_lr is None else self.outer_lr

    @property
    def momentum(self) -> float:
        """The outer momentum."""
        left_out = self.outer_momentum is None
        return DEFAULTS.get(self.rule, {}).get("outer_momentum", 0.0) if left_out else self.outer_momentum or 0.0

    @property
    def pull(self) -> float:
        """gamma."""
        return self.rate if self.gamma is None else self.gamma

    @property
    def anchors(self) -> str:
        """Form of an anchor on the wire."""
        return "none" if self.anchor_codec is None else self.anchor_codec

    @property
    def blend(self) -> float:
        """The local weights' share at landing."""
        return 0.5 if self.merge_alpha is None else self.merge_alpha
