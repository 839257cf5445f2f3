"""Whether a plan may be run: every rule that it breaks, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from isles.network.routing.legal import faults
from isles.network.routing.problem import Paths, Problem


def broken_rules(problem: Problem, paths: Paths) -> list[str]:
    """One line for each rule that `paths` break; nothing for a legal plan.

    Each slot of each origin has one path, which begins there, runs `path_length` stages in a legal order, and no node
    is on the paths of more slots than it holds.
    """
    return [*_slots(problem, paths), *_orders(problem, paths), *_loads(problem, paths)]


def _slots(problem: Problem, paths: Paths) -> Iterator[str]:
    for slot in problem.slots:
        if slot not in paths:
            yield f"origin {slot[0]}, slot {slot[1]} has no path"
    for origin, number in paths:
        if origin not in problem.origins:
            yield f"origin {origin}, slot {number}: node {origin} is not in stage 0"
        elif not 0 <= number < problem.memory:
            yield f"origin {origin}, slot {number}: slots are numbered 0 to {problem.memory - 1}"


def _orders(problem: Problem, paths: Paths) -> Iterator[str]:
    for (origin, number), path in paths.items():
        name = f"origin {origin}, slot {number}"
        strange = [node for node in path if not 0 <= node < problem.nodes]
        if strange:
            yield f"{name} visits node {strange[0]}: nodes are numbered 0 to {problem.nodes - 1}"
            continue
        if path[:1] != (origin,):
            yield f"{name} begins at node {path[0] if path else 'none'}: a path begins at its origin"
        if len(path) != problem.path_length:
            yield f"{name} runs {len(path)} stages: path_length is {problem.path_length}"
        for fault in faults([problem.stage_of[node] for node in path], problem.rules):
            yield f"{name} {fault}"


def _loads(problem: Problem, paths: Paths) -> Iterator[str]:
    loads = Counter(node for path in paths.values() for node in path if 0 <= node < problem.nodes)
    for number, stage in enumerate(problem.stages):
        slots, room = sum(loads[node] for node in stage), len(stage) * problem.memory
        if slots > room:
            yield f"stage {number} is on the paths of {slots} slots: its {len(stage)} nodes hold {room}"
        for node in stage:
            if loads[node] > problem.memory:
                yield f"node {node} is on the paths of {loads[node]} slots: it holds {problem.memory}"
