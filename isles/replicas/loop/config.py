"""The settings that outer methods share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from isles.replicas.checks import one_of
from isles.replicas.loop.weights import Weights
from isles.replicas.parts.interfaces import OnBroken
from isles.replicas.sync import MethodConfig


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

    def __post_init__(self) -> None:
        one_of("weights", self.weights, get_args(Weights))
