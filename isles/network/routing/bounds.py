"""What no plan can be faster than, and the best path of a microbatch that is alone.

round trip   slot k of an origin starts after k forwards there, and its waves go one after the other, each at least
             for the best round trip alone
origin       a node computes all forwards, losses and backwards of its own microbatches, and the first of them starts
             with nothing else to do until its best path is back
work         what all nodes of later stages have to do together, if it were spread evenly over their speeds
"""

from __future__ import annotations

import math
from collections.abc import Collection

from isles.network.routing.legal import legal_orders
from isles.network.routing.problem import Path, Problem


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


class BestPaths:
    """The best paths of a problem for a microbatch where nobody else is on the way: exact, over all legal orders.

    Round trips add up over the visits of a path, so the best way to each node of the last stage of an order is known
    once it is known for the order without it (Viterbi); orders that begin alike share what they have in common.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._orders = legal_orders(len(problem.stages), problem.path_length, problem.rules)

    def of(self, origin: int, full: Collection[int] = ()) -> tuple[float, Path] | None:
        """(seconds of the round trip, path) of the fastest path from `origin` that visits no node of `full`; the first
        in lexicographic order of those. None: there is none.
        """
        problem = self._problem
        back = 1 + problem.costs.backward
        start = (back + problem.costs.loss) * problem.forward[origin]
        open_nodes = [[node for node in sorted(stage) if node not in full] for stage in problem.stages]
        known: dict[tuple[int, ...], dict[int, tuple[float, Path]]] = {(0,): {origin: (start, (origin,))}}

        def reached(order: tuple[int, ...]) -> dict[int, tuple[float, Path]]:
            """The best way to each node of the last stage of `order`."""
            if order not in known:
                before = reached(order[:-1])
                known[order] = {
                    node: min(
                        (seconds + self._both_ways(last, node) + back * problem.forward[node], (*path, node))
                        for last, (seconds, path) in before.items()
                    )
                    for node in open_nodes[order[-1]]
                    if before
                }
            return known[order]

        found: tuple[float, Path] | None = None
        for order in self._orders:
            for last, (seconds, path) in reached(order).items():
                whole = seconds + self._both_ways(last, origin), path
                if found is None or whole < found:
                    found = whole
        return found if found is not None and math.isfinite(found[0]) else None

    def _both_ways(self, one: int, other: int) -> float:
        return self._problem.hop(one, other) + self._problem.hop(other, one)
