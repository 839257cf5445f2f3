"""Who exchanges with whom."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Everyone:
    """All workers: the answer is the mean over the world."""

    agrees: bool = True
    name: ClassVar[str] = "all"

    def members(self, round: int, size: int, position: int) -> tuple[int, ...]:
        return _all(size)


@lru_cache(maxsize=8)
def _all(size: int) -> tuple[int, ...]:
    return tuple(range(size))


@dataclass(frozen=True, slots=True)
class Nobody:
    """Every worker alone: the outer rule acts on its own progress (Lookahead, Zhang et al. 2019)."""

    agrees: bool = False
    name: ClassVar[str] = "nobody"

    def members(self, round: int, size: int, position: int) -> tuple[int, ...]:
        return (position,)


@dataclass(frozen=True, slots=True)
class RandomGroups:
    """New random groups of `group_size` every round, drawn by everyone from the same seed (NoLoCo, section 3; no
    message).

    With a permutation p of the workers and h = size // group_size groups, p[i] goes to group i mod h. The size mod
    group_size workers left over are alone in that round.
    """

    group_size: int
    seed: int
    agrees: bool = False
    name: ClassVar[str] = "groups"

    def members(self, round: int, size: int, position: int) -> tuple[int, ...]:
        return _random_groups(self.group_size, self.seed, round, size)[position]


@lru_cache(maxsize=64)
def _random_groups(group_size: int, seed: int, round: int, size: int) -> tuple[tuple[int, ...], ...]:
    """The group of every position."""
    order = list(range(size))
    random.Random(f"isles groups {seed} {round}").shuffle(order)
    count = size // group_size
    groups: list[tuple[int, ...]] = [(position,) for position in range(size)]
    for index in range(count):
        together = tuple(sorted(order[index : count * group_size : count]))
        for position in together:
            groups[position] = together
    return tuple(groups)
