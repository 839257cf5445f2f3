"""The settings of IST; terms as in `ist`. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from isles.replicas.config import MethodConfig, at_least, one_of
from isles.replicas.search_space import Dimension, rounds

SAMPLERS = ("random", "stratified", "rolling", "fixed")
SERVERS = ("partitioned", "central")


@dataclass(frozen=True, kw_only=True)
class ISTConfig(MethodConfig):
    """Settings of `ist`."""

    sync_every: int = 50
    """Inner steps between two divisions (H)."""
    split: str = "all"
    """What is divided: heads, ffn, heads+ffn, or "all" that the model can (never whole blocks)."""
    sampler: Literal["random", "stratified", "rolling", "fixed"] = "random"
    """Who trains which units: random; stratified (equally from each server); rolling (moved on by 1 a round); fixed."""
    server: Literal["partitioned", "central"] = "partitioned"
    """Who keeps them between rounds: partitioned (1/n each) or central (worker 0)."""
    optimizer_state: Literal["travel", "reset"] = "travel"
    """What becomes of the inner optimizer's moments: travel (they go with their units) or reset (fresh every round)."""
    eval_scale: Literal["keep_fraction", "none"] = "keep_fraction"
    """Of what reads divided units, in the full model: keep_fraction (1/n) or none."""
    seed: int = 0
    """Seed of the divisions."""

    def __post_init__(self) -> None:
        at_least("sync_every", self.sync_every, 1)
        one_of("sampler", self.sampler, SAMPLERS)
        one_of("server", self.server, SERVERS)
        one_of("optimizer_state", self.optimizer_state, ("travel", "reset"))
        one_of("eval_scale", self.eval_scale, ("keep_fraction", "none"))

    @override
    def space(self, steps: int, *, timed: bool) -> list[Dimension]:
        """H counts at equal tokens, too: what a worker does not hold for long it does not learn."""
        who = Dimension(name="replicas.sampler", start=self.sampler, choices=("random", "stratified", "rolling"))
        return [who, rounds(self, steps)]
