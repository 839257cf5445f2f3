"""Turning the subspace of a boundary, as it is planned: what `isles.pipeline.turning` sends. No tensors.

last stages     D x D numbers to all that share the stage, then to the last stages of the other replicas
their replicas  D x K numbers from the last stage to the others, along a tree
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isles.network.planner.planned import MessagePattern, PlannedExchange, Tree, by_size, gathered
from isles.network.planner.replay import RunReplay, TimeAccount
from isles.network.topology import Topology

_NUMBER = 8  # bytes, float64


@dataclass(frozen=True, kw_only=True)
class PlannedTurn:
    """One turn. columns, stages: as of `StagedSteps`. width, rank: D and K."""

    columns: Sequence[Sequence[int]]
    stages: int
    width: int
    rank: int

    @property
    def workers(self) -> int:
        """In all."""
        return sum(map(len, self.columns))

    @property
    def exchanges(self) -> list[PlannedExchange]:
        """One after the other, after the first step. Groups are of ranks."""
        own = [column[self.stages - 1 :: self.stages] for column in self.columns]  # the last stages' workers
        statistic, basis = _NUMBER * self.width**2, _NUMBER * self.width * self.rank
        firsts = range(0, len(self.columns[0]), self.stages)
        told = [
            (column[first + self.stages - 1], *column[first : first + self.stages - 1])
            for column in self.columns
            for first in firsts
        ]
        return [
            self._one(0, list(zip(*own, strict=True)), lambda size: gathered(statistic, size)),
            self._one(1, own, lambda size: gathered(statistic, size)),
            self._one(2, told, lambda size: Tree(basis)),
        ]

    @property
    def bytes_sent(self) -> tuple[float, ...]:
        """By rank."""
        return tuple(map(sum, zip(*(one.bytes_sent for one in self.exchanges), strict=True)))

    def account(self, topology: Topology) -> TimeAccount:
        """What a worker waits for it, where all come to it at once."""
        waits = RunReplay(topology, [0.0] * self.workers).waits(self.exchanges, 1)
        seconds = waits.waiting(1, 1)
        return TimeAccount(0.0, seconds, seconds)

    def _one(
        self, number: int, groups: Sequence[Sequence[int]], pattern: Callable[[int], MessagePattern]
    ) -> PlannedExchange:
        alone = set(range(self.workers)).difference(*groups)
        made = (*map(tuple, groups), *((rank,) for rank in sorted(alone)))
        return PlannedExchange(1.0, 1, 0, "turn", made, by_size(made, pattern), number, "inner")
