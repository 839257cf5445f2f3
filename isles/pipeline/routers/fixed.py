"""Every replica's microbatches go through its own stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from isles.network.routing.routes import Route, fixed_routes


@dataclass(frozen=True)
class FixedRouter:
    """`replicas` columns of `stages` workers, `microbatches` for each; home: the loss is computed at the origin."""

    replicas: int
    stages: int
    microbatches: int
    home: bool

    @cached_property
    def _routes(self) -> Sequence[Route]:
        return tuple(fixed_routes(self.replicas, self.stages, self.microbatches, home=self.home))

    def routes(self, step: int) -> Sequence[Route]:
        """The same in every step."""
        return self._routes
