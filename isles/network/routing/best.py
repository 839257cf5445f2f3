"""The best path of one microbatch where nobody else is on the way: exact, over all legal orders of stages.

Round trips add up over the visits of a path, so the best way to each node of the last stage of an order is known once
it is known for the order without it (Viterbi); orders that begin alike share what they have in common.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from isles.network.routing.legal import legal_orders
from isles.network.routing.problem import Path, Problem


class BestPaths:
    """The paths of a problem."""

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
