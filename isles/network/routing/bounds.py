"""What no plan can be faster than.

round trip   slot k of an origin starts after k forwards there, and its waves go one after the other, each at least
             for the best round trip alone
origin       a node computes all forwards, losses and backwards of its own microbatches, and the first of them starts
             with nothing else to do until its best path is back
work         what all nodes of later stages have to do together, if it were spread evenly over their speeds
"""

from __future__ import annotations

from isles.network.routing.best import BestPaths
from isles.network.routing.problem import Problem


def lower_bounds(problem: Problem) -> dict[str, float]:
    """Seconds of a step by the name of the bound; the largest is the one that counts. ValueError where an origin has no
    legal path.
    """
    best, costs = BestPaths(problem), problem.costs
    trips, works = [], []
    for origin in problem.origins:
        found = best.of(origin)
        if found is None:
            raise ValueError(f"there is no legal path of {problem.path_length} stages: choose another path_length")
        first = problem.forward[origin] + costs.rest_at_origin
        trips.append((problem.memory - 1) * first + problem.waves * found[0])
        own = problem.memory * problem.waves
        each = problem.forward[origin] * (1 + costs.loss + costs.backward)
        works.append(own * (each + costs.rest_at_origin + 2 * costs.rest) - costs.rest)
    rate = sum(1 / problem.forward[node] for stage in problem.stages[1:] for node in stage)
    visits = problem.microbatches * (problem.path_length - 1)
    work = visits * (1 + costs.backward) / rate if visits else 0.0
    return {"round trip": max(trips), "origin": max(works), "work": work}
