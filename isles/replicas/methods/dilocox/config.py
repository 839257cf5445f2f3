"""The settings of DiLoCoX; symbols as in `dilocox`. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isles.comm.codecs.kinds import CODECS, read_codec
from isles.replicas.config import (
    Feedback,
    PartsConfig,
    WeightedConfig,
    at_least,
    check_feedback,
    momentum_in_range,
    one_of,
    positive_rate,
)


@dataclass(frozen=True, kw_only=True)
class DiLoCoXConfig(PartsConfig, WeightedConfig):
    """Settings of `dilocox`."""

    sync_every: int = 125
    """Inner steps of a round (H_1)."""
    outer_lr: float = 0.4
    """Outer learning rate (lr); lower it before the momentum."""
    outer_momentum: float = 0.9
    """Outer momentum (mu)."""
    delay: Literal["carry", "restart", "none"] = "carry"
    """What a round starts from while the last one's mean is under way: carry (the anchor and the own progress), restart
    (the anchor), none (it is waited for).
    """
    rank: int | None = None
    """Rank of the factors at first (r_1); left out, an eighth of the width most matrices have; 0: no low rank."""
    codec: str = "int4"
    """Form of the factors, or of everything with rank = 0; package.module:Class, which sends every entry."""
    min_compression_rate: float | None = None
    """Matrices that would not shrink by more travel dense; left out, 2."""
    start_compress: int | None = None
    """So many rounds travel dense in 8 bits first; left out, 2."""
    error_feedback: Feedback = "local"
    """What the codec loses is added to the next round: "none", "local" or "global" (what differs from the mean)."""
    feedback_decay: float = 1.0
    """Factor on it each round, 0..1."""
    window: int | None = None
    """Rounds over which the rank, and with it H, is adapted; left out, 5; 0: both stay."""
    energy: float | None = None
    """Part of the mean's square that the ranks are to hold, 0..1; left out, 0.95."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("sync_every", self.sync_every, 1)
        positive_rate(self.outer_lr)
        momentum_in_range(self.outer_momentum)
        one_of("delay", self.delay, ("carry", "restart", "none"))
        at_least("rank", self.rank or 0, 0)
        named = read_codec(self.codec)  # refuses an unknown one
        self.check_own()
        if self.codec not in CODECS and not named.is_own and self.rank != 0:
            raise ValueError(
                f"codec = {self.codec} leaves out entries of factors: choose one such as int4, or rank = 0"
            )
        check_feedback(self.error_feedback, self.feedback_decay)
        for key in ("start_compress", "window", "min_compression_rate", "energy"):
            value = getattr(self, key)
            at_least(key, value or 0, 0)
            if value and self.rank == 0:
                raise ValueError(f"{key} = {value} has no low rank to act on: leave it out, or leave out rank = 0")
        if self.energy is not None and self.window == 0:
            raise ValueError(f"energy = {self.energy} is of a rank that adapts: leave it out, or leave out window = 0")
        if not 0 < self.held <= 1:
            raise ValueError(f"energy = {self.energy}: choose a part above 0, up to 1, such as 0.95")

    @property
    def rounds_averaged(self) -> int:
        """window with its default."""
        return (0 if self.rank == 0 else 5) if self.window is None else self.window

    @property
    def held(self) -> float:
        """energy with its default."""
        return 0.95 if self.energy is None else self.energy
