"""How long a step of a legal plan takes, without a replay of its events.

Where no forward ever waits for memory, a node serves its tasks in the order in which they become ready, so one heap of
ready tasks is enough: a task that is taken from it starts when it is ready and its node is free. No forward waits where
no more slots come by a node than it holds, for a slot has one microbatch on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from isles.network.routing.problem import Path, Problem
from isles.network.routing.routes import Route


class Stopwatch:
    """The makespan of one set of paths after another, in a fraction of a replay's time.

    Equal to `replay_paths` to the bit for legal plans.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._seconds = problem.seconds
        self._chains: dict[Path, list[tuple[int, float, float, float]]] = {}

    def __call__(self, paths: Sequence[Path]) -> tuple[float, float]:
        """(seconds of a step, mean seconds after which a slot is through) of one path for each slot."""
        chains = [self._chains.get(path) or self._chain(path) for path in paths]
        slots = len(chains)
        last = slots * (self._problem.waves - 1)
        free = [0.0] * self._problem.nodes
        heap = [(0.0, microbatch, 0) for microbatch in range(slots)]
        heapify(heap)
        total = longest = 0.0
        while heap:
            ready, microbatch, step = heap[0]
            chain = chains[microbatch % slots]
            node, seconds, rest, way = chain[step]
            end = (ready if ready > free[node] else free[node]) + seconds
            free[node] = end + rest
            if step + 1 < len(chain):
                heapreplace(heap, (end + way, microbatch, step + 1))
            elif microbatch < last:
                heapreplace(heap, (end, microbatch + slots, 0))
            else:
                heappop(heap)
                total += end
                longest = max(longest, end)
        return longest, total / slots

    def _chain(self, path: Path) -> list[tuple[int, float, float, float]]:
        """(node, seconds, rest, way to the next) of each task."""
        problem, route = self._problem, Route(0, path, True)
        seconds = {"F": self._seconds.forward, "L": self._seconds.loss, "B": self._seconds.backward}
        made = []
        for task in route.tasks():
            node, following = route.worker(task), route.following(task)
            way = 0.0 if following is None else problem.hop(node, route.worker(following))
            made.append((node, seconds[task.kind][node], problem.rest(task), way))
        self._chains[path] = made
        return made
