"""Four ways of sending the same number of microbatches through the same nodes, each replayed.

full      fixed pipelines through all stages, as many as the smallest stage has nodes (what a plan competes with)
random    legal paths that know nothing of the network
without   legal paths, each fast alone
with      legal paths whose collisions are counted: the plan
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from isles.network.routing.assign import aligned
from isles.network.routing.plan import PlanNetwork
from isles.network.routing.problem import Paths, Problem, replay_routes, routes_of
from isles.network.routing.replay import Replay
from isles.network.routing.routes import Route
from isles.network.routing.search import Effort, blind, with_collisions, without_collisions
from isles.network.routing.wires import Sizes, bytes_sent


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way. played: a step on lines that messages share. seconds: that it takes; the mean where latencies vary.
    planning: seconds that it took to find. paths: of the slots, where it has such.
    """

    name: str
    routes: Sequence[Route]
    played: Replay
    seconds: float
    planning: float
    paths: Paths | None = None

    def sent(self, sizes: Sizes) -> Counter[int]:
        """Bytes that each node sends in a step."""
        return bytes_sent(self.routes, sizes)


def strategies(problem: Problem, effort: Effort, seed: int = 0, network: PlanNetwork | None = None) -> list[Strategy]:
    """All four, the plan last, replayed on `network`, whose lines messages share; None: each message is alone.

    The search counts each message as if it were alone. Of the paths that are fast alone and those whose collisions are
    counted the plan takes those with the shorter step on `network`. ValueError where no legal paths fit.
    """
    began = time.monotonic()
    by_chance = blind(problem, seed)
    drawn = time.monotonic()
    alone = without_collisions(problem, effort, seed)
    fitted = time.monotonic()
    best = with_collisions(problem, effort, alone, seed)
    done = time.monotonic()
    without = _replayed("without", problem, network, alone, fitted - drawn)
    plan = _replayed("with", problem, network, best, done - drawn)
    if without.seconds < plan.seconds:
        plan = replace(without, name="with", planning=done - drawn)
    return [full(problem, network), _replayed("random", problem, network, by_chance, drawn - began), without, plan]


def full(problem: Problem, network: PlanNetwork | None = None) -> Strategy:
    """Fixed pipelines; microbatches are dealt out to their slots in turn."""
    lines = aligned(problem.stages, problem.delays, problem.forward)
    latest: dict[int, int] = {}
    routes = []
    for number in range(problem.microbatches):
        slot = number % (len(lines) * problem.memory)
        routes.append(Route(number, lines[slot % len(lines)], True, latest.get(slot)))
        latest[slot] = number
    return _replayed("full", problem, network, routes)


def _replayed(
    name: str, problem: Problem, network: PlanNetwork | None, found: Paths | Sequence[Route], planning: float = 0.0
) -> Strategy:
    """found: paths of the slots, or the routes of a step."""
    paths = found if isinstance(found, Mapping) else None
    routes = found if isinstance(found, Sequence) else routes_of(found, problem.waves)
    played = [replay_routes(problem, routes)] if network is None else network.replays(problem, routes)
    seconds = fmean(step.makespan for step in played)
    return Strategy(name=name, routes=routes, played=played[0], seconds=seconds, planning=planning, paths=paths)
