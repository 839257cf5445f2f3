"""Which way each microbatch goes: one router for each kind of routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from isles.network.routing.routes import Route, fixed_routes, random_routes


class Router(Protocol):
    """The ways of a step's microbatches, the same at every worker that asks."""

    def routes(self, step: int) -> Sequence[Route]:
        """Those of inner step `step`, counted from 1. Positions are those of `mesh.pipeline`: replica x stages +
        stage.
        """


@dataclass(frozen=True)
class FixedRouter:
    """Every replica's microbatches go through its own stages: `replicas` columns of `stages` workers, `microbatches`
    for each; home: the loss is computed at the origin.
    """

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


@dataclass(frozen=True)
class ExchangedRouter:
    """As `FixedRouter`, with the loss at the origin; half of the microbatches see the ends behind the origin exchanged
    (CheckFree+, arXiv 2506.15461).

        even microbatches   0 1 2 3 4 5
        odd ones            0 2 1 3 5 4

    So the second stage learns to do what the first one behind the origin does, and the last but one what the last does.
    Of three stages behind the origin the middle one is in both pairs: they are exchanged in turn.
    """

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


@dataclass(frozen=True)
class RandomRouter:
    """NoLoCo's random routing (arXiv 2506.10911, section 3.1): as `FixedRouter`, with a permutation of the replicas at
    every boundary, anew for each microbatch, so that all stages of one depth see everybody's text and stay close
    without an exchange of weights. Each worker gets each of the `microbatches` exactly once.

    Every worker computes the permutation from (seed, step, microbatch, boundary); nothing is agreed upon over the wire.
    The backward pass takes the way back.
    """

    replicas: int
    stages: int
    microbatches: int
    home: bool
    seed: int

    def routes(self, step: int) -> Sequence[Route]:
        """Those of this step."""
        return tuple(
            random_routes(self.replicas, self.stages, self.microbatches, home=self.home, seed=self.seed, step=step)
        )


@dataclass(frozen=True)
class PlanRouter:
    """The ways of a plan (SkipPipe, arXiv 2502.19913): a path for each slot of each origin, the same in every step.
    made: those of a step, in positions of the pipeline's group.
    """

    made: tuple[Route, ...]

    def routes(self, step: int) -> Sequence[Route]:
        """The same in every step."""
        return self.made
