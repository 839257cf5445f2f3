"""The settings that outer methods share, and checks of those that some have. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from isles.comm.codecs.kinds import read_form
from isles.replicas.config import Feedback, MethodConfig, OnBroken, PartsConfig, at_least, check_feedback, one_of

Weights = Literal["equal", "samples"]
Fragments = str | tuple[tuple[str, ...], ...]
FirstSync = Literal["full_window", "offset"]
PATTERNS = ("whole", "sequential", "strided")
OnLate = Literal["wait", "quorum"]


@dataclass(frozen=True, kw_only=True)
class OuterConfig(MethodConfig):
    """What every outer method takes."""

    on_broken: OnBroken = "skip"
    """Where a worker's share is not finite: skip, nobody takes that round; leave out, the mean is of the others'."""


@dataclass(frozen=True, kw_only=True)
class WeightedConfig(OuterConfig):
    """What a method takes whose answer is a mean over all workers."""

    weights: Weights = "equal"
    """How much each worker counts in the mean: "equal", or by the "samples" of its share of the text."""
    on_late: OnLate = "wait"
    """Where workers come and go: wait for all; or take the mean of those who have delivered once they are a "quorum",
    by inner steps, while all train on; who is late delivers into the next round.
    """
    quorum: float = 0.75
    """Share of the workers that is one, above 0."""

    def __post_init__(self) -> None:
        one_of("weights", self.weights, get_args(Weights))
        one_of("on_late", self.on_late, get_args(OnLate))
        if not 0 < self.quorum <= 1:
            raise ValueError(f"quorum = {self.quorum}: choose a share of the workers, above 0 and at most 1")
        if self.on_late == "wait" and self.quorum != type(self).quorum:
            raise ValueError(f'quorum = {self.quorum}: acts with on_late = "quorum" alone; set that, or leave it out')
        if self.on_late == "quorum" and self.weights == "samples":
            raise ValueError('on_late = "quorum" counts workers by inner steps: choose weights = "equal"')


@dataclass(frozen=True, kw_only=True)
class CompressedConfig(PartsConfig, WeightedConfig):
    """What a method takes of which a mean of outer gradients travels, in any form."""

    codec: str = "none"
    """Form of the outer gradient on the wire (none, fp16, bf16, int8, int4, fp4, sign, topk:64, powersgd:16, ...), or
    package.module:Class."""
    error_feedback: Feedback = "none"
    """What the codec loses is added to the next round's: "none", "local" (this worker's own loss) or "global" (what
    differs from the mean that came back).
    """
    feedback_decay: float = 1.0
    """Factor on it each round, 0..1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        read_form(self.codec)  # refuses an unknown one
        self.check_own()
        check_feedback(self.error_feedback, self.feedback_decay)


@dataclass(frozen=True, kw_only=True)
class FragmentedConfig(OuterConfig):
    """What a method takes that may cut the model."""

    fragments: Fragments = "whole"
    """How the model is cut: "strided", "sequential", "whole", or lists of parameter names or their beginnings."""
    layers_per_fragment: int | None = None
    """Blocks in each; left out, 3, or half of a shorter model's."""


def check_fragments(
    fragments: Fragments, layers_per_fragment: int | None, first_sync: FirstSync = "full_window"
) -> None:
    """What can be said without a model. ValueError for what fits none."""
    one_of("first_sync", first_sync, get_args(FirstSync))
    if first_sync == "offset" and fragments == "whole":
        raise ValueError('first_sync = "offset" acts on several fragments only: leave it out, or cut the model')
    if isinstance(fragments, str):
        one_of("fragments", fragments, PATTERNS)
    elif not fragments:
        raise ValueError('fragments = []: name the parameters of each, or choose "whole"')
    if layers_per_fragment is not None:
        at_least("layers_per_fragment", layers_per_fragment, 1)
        if fragments not in ("sequential", "strided"):
            raise ValueError(
                f"layers_per_fragment = {layers_per_fragment} acts on sequential and strided fragments only: leave it "
                'out, or choose fragments = "strided"'
            )
