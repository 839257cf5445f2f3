"""Which orders of stages a microbatch may take (SkipPipe, arXiv 2502.19913: its convergence constraints).

Stage 0 comes first and is never left out. A stage that comes after a higher one is a swap, its distance how far it lies
below the highest stage before it; a stage that lies further above the highest one before it than one jumps over those
between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isles.errors import demand


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRules:
    """swaps: in one path. distance: of one swap. total: of all of them together. jump: to how far above the highest
    stage so far the next one may lie.
    """

    swaps: int = 2
    distance: int = 1
    total: int = 2
    jump: int = 4

    def __post_init__(self) -> None:
        demand(self, "swaps distance total", lambda x: x >= 0, "choose 0 or more")
        demand(self, "jump", lambda x: x >= 1, "choose 1 or more; with 1 no stage is left out but the last ones")


def faults(order: Sequence[int], rules: PathRules) -> list[str]:
    """What is wrong with an order of stages, a few words each; nothing for a legal one."""
    found = []
    if not order or order[0] != 0:
        found.append("does not begin with stage 0")
    if len(set(order)) < len(order):
        twice = sorted({stage for stage in order if order.count(stage) > 1})
        found.append(f"runs stage {twice[0]} twice")
    highest, distances = 0, []
    for stage in order[1:]:
        if stage < highest:
            distances.append(highest - stage)
        elif stage > highest + rules.jump:
            found.append(f"jumps from stage {highest} to {stage}, at most {highest + rules.jump} is allowed")
        highest = max(highest, stage)
    if any(distance > rules.distance for distance in distances):
        found.append(f"swaps stages {max(distances)} apart, at most {rules.distance} is allowed")
    if len(distances) > rules.swaps or sum(distances) > rules.total:
        found.append(
            f"has {len(distances)} swaps of distance {sum(distances)} in all, at most {rules.swaps} of {rules.total} "
            "are allowed"
        )
    return found


def legal_orders(stages: int, length: int, rules: PathRules) -> list[tuple[int, ...]]:
    """All legal orders of `length` of `stages` stages, in lexicographic order."""
    made: list[tuple[int, ...]] = []

    def extend(order: tuple[int, ...]) -> None:
        if len(order) == length:
            made.append(order)
            return
        for stage in range(1, stages):
            if stage not in order and not faults((*order, stage), rules):
                extend((*order, stage))

    extend((0,))
    return made
