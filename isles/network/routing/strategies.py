"""Four ways of sending the same number of microbatches through the same nodes, each replayed.

full      fixed pipelines through all stages, as many as the smallest stage has nodes (what a plan competes with)
random    legal paths that know nothing of the network
without   legal paths, each fast alone
with      legal paths whose collisions are counted: the plan
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from isles.network.routing.assign import aligned
from isles.network.routing.problem import Paths, Problem, replay_paths, routes_of
from isles.network.routing.replay import Replay, first_come, replay
from isles.network.routing.routes import Route
from isles.network.routing.search import Effort, blind, with_collisions, without_collisions
from isles.network.routing.wires import Delays, Sizes, bytes_sent


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way. planning: seconds that it took to find. paths: of the slots, where it has such."""

    name: str
    routes: Sequence[Route]
    played: Replay
    planning: float
    paths: Paths | None = None

    def sent(self, nbytes: int) -> Counter[int]:
        """Bytes that each node sends in a step, with `nbytes` a message."""
        return bytes_sent(self.routes, Sizes(forward=nbytes, home=nbytes, backward=nbytes))


def strategies(problem: Problem, effort: Effort, seed: int = 0) -> list[Strategy]:
    """All four, the plan last. ValueError where no legal paths fit."""
    began = time.monotonic()
    by_chance = blind(problem, seed)
    drawn = time.monotonic()
    alone = without_collisions(problem, effort, seed)
    fitted = time.monotonic()
    best = with_collisions(problem, effort, alone, seed)
    done = time.monotonic()
    return [
        full(problem),
        _planned("random", problem, by_chance, drawn - began),
        _planned("without", problem, alone, fitted - drawn),
        _planned("with", problem, best, done - drawn),
    ]


def full(problem: Problem) -> Strategy:
    """Fixed pipelines; microbatches are dealt out to their slots in turn."""
    lines = aligned(problem.stages, problem.delays, problem.forward)
    latest: dict[int, int] = {}
    routes = []
    for number in range(problem.microbatches):
        slot = number % (len(lines) * problem.memory)
        routes.append(Route(number, lines[slot % len(lines)], True, latest.get(slot)))
        latest[slot] = number
    played = replay(
        routes,
        problem.seconds,
        Delays(problem.delays),
        first_come,
        room=dict.fromkeys(range(problem.nodes), problem.memory),
        pause=problem.rest,
    )
    return Strategy(name="full", routes=routes, played=played, planning=0.0)


def _planned(name: str, problem: Problem, paths: Paths, planning: float) -> Strategy:
    return Strategy(
        name=name,
        routes=routes_of(paths, problem.waves),
        played=replay_paths(problem, paths),
        planning=planning,
        paths=paths,
    )
