"""The ways of a plan (SkipPipe, arXiv 2502.19913): a path for each slot of each origin, the same in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isles.network.routing.routes import Route


@dataclass(frozen=True)
class PlanRouter:
    """made: of a step, in positions of the pipeline's group."""

    made: tuple[Route, ...]

    def routes(self, step: int) -> Sequence[Route]:
        """The same in every step."""
        return self.made
