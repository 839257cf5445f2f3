"""Which way each microbatch goes.

A router is told an inner step, counted from 1, and says the ways of its microbatches, the same at every worker that
asks. Positions are those of `mesh.pipeline`: replica x stages + stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from isles.network.routing.routes import Route, fixed_routes, random_routes

Router = Callable[[int], Sequence[Route]]


def always(routes: Iterable[Route]) -> Router:
    """These in every step, such as those of `isles.network.routing.routes.fixed_routes`."""
    made = tuple(routes)
    return lambda step: made


def exchanged_routes(replicas: int, stages: int, microbatches: int) -> list[Route]:
    """As `fixed_routes`, with the loss at the origin; half of the microbatches see the ends behind the origin exchanged
    (CheckFree+, arXiv 2506.15461).

        even microbatches   0 1 2 3 4 5
        odd ones            0 2 1 3 5 4

    So the second stage learns to do what the first one behind the origin does, and the last but one what the last does.
    Of three stages behind the origin the middle one is in both pairs: they are exchanged in turn.
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


def random_router(replicas: int, stages: int, microbatches: int, *, home: bool, seed: int) -> Router:
    """NoLoCo's random routing (arXiv 2506.10911, section 3.1): a permutation of the replicas at every boundary, anew
    for each microbatch, so that all stages of one depth see everybody's text and stay close without an exchange of
    weights. Each worker gets each of the `microbatches` exactly once.

    Every worker computes the permutation from (seed, step, microbatch, boundary); nothing is agreed upon over the wire.
    The backward pass takes the way back.
    """
    return lambda step: random_routes(replicas, stages, microbatches, home=home, seed=seed, step=step)
