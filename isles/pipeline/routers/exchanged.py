"""Fixed pipelines, half of whose microbatches see the ends behind the origin exchanged (CheckFree+, arXiv 2506.15461).

    even microbatches   0 1 2 3 4 5
    odd ones            0 2 1 3 5 4

So the second stage learns to do what the first one behind the origin does, and the last but one what the last does.
Of three stages behind the origin the middle one is in both pairs: they are exchanged in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from isles.network.routing.routes import Route, fixed_routes


@dataclass(frozen=True)
class ExchangedRouter:
    """As `FixedRouter`, with the loss at the origin."""

    replicas: int
    stages: int
    microbatches: int

    @cached_property
    def _routes(self) -> Sequence[Route]:
        straight = fixed_routes(self.replicas, self.stages, self.microbatches, home=True)
        return tuple(
            Route(route.microbatch, self._exchanged(route.visits, route.microbatch // self.replicas), True)
            for route in straight
        )

    def _exchanged(self, visits: tuple[int, ...], number: int) -> tuple[int, ...]:
        if number % 2 == 0 or self.stages < 3:
            return visits
        firsts = {1, self.stages - 2}
        if self.stages == 4:
            firsts = {1 if number % 4 == 1 else 2}
        made = list(visits)
        for first in firsts:
            made[first], made[first + 1] = made[first + 1], made[first]
        return tuple(made)

    def routes(self, step: int) -> Sequence[Route]:
        """The same in every step."""
        return self._routes
