"""The routes of microbatches through the workers.

Routes of a step are a function of the step, counted from 1, equal at all workers. Positions are those of
`mesh.pipeline`: replica x stages + stage.

    [pipeline]
    routing = "mine:Ring"           # a `Router` of your own, called as Ring(shift=1)
    [pipeline.options.router]
    shift = 1
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from isles.network.routing.events import Route, check_routes, fixed_routes, position, random_routes, visited

StepRoutes = Callable[[int], Sequence[Route]]


class PipelineGrid(NamedTuple):
    """The workers and microbatches that a router plans for.

    replicas, stages: of the run. microbatches: per replica and step, so there are replicas x microbatches. home: the
    loss is computed at stage 0, so every route leads back. seed: of the run.
    """

    replicas: int
    stages: int
    microbatches: int
    home: bool
    seed: int

    def worker(self, replica: int, stage: int) -> int:
        """The position, as routes name it, of the worker that serves `stage` in `replica`."""
        return position(replica, stage, self.stages)


class Router(ABC):
    """Which way each microbatch goes: a router of your own, `pipeline.routing = "package.module:Class"`."""

    @abstractmethod
    def routes(self, step: int, grid: PipelineGrid) -> Sequence[Route]:
        """The routes of an inner step: a pure function, for every worker asks by itself.

        Args:
            step: counted from 1.
            grid: see there.

        Returns:
            One route a microbatch, numbered from 0. Each visits one worker of stage 0, 1, ..., in this order, and each
            worker gets as many as `grid.microbatches`; see `PipelineGrid.worker`.
        """


def own_routes(router: Router, grid: PipelineGrid, name: str) -> StepRoutes:
    """The routes of a user's own router. ValueError at the step that breaks the rules of `Router.routes`."""
    stages, replicas, each = list(range(grid.stages)), grid.replicas, grid.microbatches

    def routes_of(step: int) -> Sequence[Route]:
        routes = tuple(router.routes(step, grid))
        try:
            check_routes(routes, replicas * len(stages))
            for route in routes:
                if [one % len(stages) for one in route.visits] != stages or route.home != grid.home:
                    what = f"visits {route.visits} with home = {route.home}: visit one worker of each stage"
                    raise ValueError(f"microbatch {route.microbatch} {what}, in order, with home = {grid.home}")
            count = visited(routes)
            if set(count.values()) != {each} or len(count) != replicas * len(stages):
                raise ValueError(f"workers are visited {dict(count)} times: lead {each} microbatches to each")
            if {route.microbatch for route in routes} != set(range(replicas * each)):
                raise ValueError(f"number the microbatches from 0 to {replicas * each - 1}")
        except ValueError as error:
            raise ValueError(f'pipeline.routing = "{name}", step {step}: {error}') from None
        return routes

    return routes_of


def always(routes: Iterable[Route]) -> StepRoutes:
    """The same routes in every step, such as those of `isles.network.routing.events.fixed_routes`."""
    made = tuple(routes)
    return lambda step: made


def exchanged_routes(replicas: int, stages: int, microbatches: int) -> list[Route]:
    """As `fixed_routes`, with the loss at the origin; half of the microbatches visit stages 1 and 2, and the last two
    stages, in exchanged order (CheckFree+, arXiv 2506.15461).

        even microbatches   0 1 2 3 4 5
        odd ones            0 2 1 3 5 4

    So stage 2 also learns the function of stage 1, and the last but one that of the last. Of three stages after the
    origin the middle one is in both pairs: they are exchanged alternately.
    """
    return [
        Route(route.microbatch, _exchanged(route.visits, route.microbatch // replicas), True)
        for route in fixed_routes(replicas, stages, microbatches, home=True)
    ]


def _exchanged(visits: tuple[int, ...], number: int) -> tuple[int, ...]:
    stages = len(visits)
    if number % 2 == 0 or stages < 3:
        return visits
    firsts = {1, stages - 2}
    if stages == 4:
        firsts = {1 if number % 4 == 1 else 2}
    made = list(visits)
    for first in firsts:
        made[first], made[first + 1] = made[first + 1], made[first]
    return tuple(made)


def random_router(replicas: int, stages: int, microbatches: int, *, home: bool, seed: int) -> StepRoutes:
    """NoLoCo's random routing (arXiv 2506.10911, section 3.1): a permutation of the replicas at every boundary, anew
    for each microbatch, so that all stages of one depth see everybody's text and stay close without an exchange of
    weights. Each worker gets each of the `microbatches` exactly once.

    Every worker computes the permutation from (seed, step, microbatch, boundary); nothing is agreed upon over the wire.
    The backward pass takes the way back.
    """
    return lambda step: random_routes(replicas, stages, microbatches, home=home, seed=seed, step=step)
