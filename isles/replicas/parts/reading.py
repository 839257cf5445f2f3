"""What of an answer counts as the outer gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Received:
    """The mean, as it came."""

    needs_own: bool = False
    name: ClassVar[str] = "received"

    def read(self, mean: Tensor, fresh: Tensor | None, own: Tensor | None, participants: int) -> Tensor:
        return mean


@dataclass(frozen=True, slots=True)
class Eager:
    """The mean A of a round whose answer comes a round or more late, with this worker's own stale share replaced by its
    fresh one (Eager Updates, arXiv 2502.12996, Algorithm 3):

        A + (own_new - own_old) / M

    own: as the others decoded it; M: participants of the mean. Anchors are then each worker's own.
    """

    needs_own: bool = True
    name: ClassVar[str] = "eager"

    def read(self, mean: Tensor, fresh: Tensor | None, own: Tensor | None, participants: int) -> Tensor:
        if own is not None:
            mean.sub_(own, alpha=1 / participants)
        if fresh is not None:
            mean.add_(fresh, alpha=1 / participants)
        return mean
