"""The coordinates of every rank on the axes of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, Literal, NamedTuple

MeshAxis = Literal["replica", "stage", "inner"]


class Coordinate(NamedTuple):
    """A worker's place. replica: number of its replica. stage: number of its piece of the model. inner: its number
    among the workers that share the piece's data-parallel work.
    """

    replica: int
    stage: int
    inner: int


@dataclass(frozen=True)
class Layout:
    """`coordinates[rank]`, all different. Replicas may be unequal; `grid` makes equal ones."""

    coordinates: tuple[Coordinate, ...]

    def __post_init__(self) -> None:
        if len(set(self.coordinates)) != len(self.coordinates):
            raise ValueError(f"layout {self.coordinates}: two ranks have the same coordinates; give each its own")

    @classmethod
    def grid(cls, outer: int, stage: int = 1, inner: int = 1) -> Layout:
        """`outer` replicas of `stage` stages of `inner` workers each. rank = (replica * stages + stage) * inner + inner
        coordinate, so the workers of an island have neighbouring ranks. ValueError for an axis without a worker.
        """
        if min(outer, stage, inner) < 1:
            raise ValueError(f"mesh outer={outer}, stage={stage}, inner={inner}: every axis needs at least 1 worker")
        return cls(tuple(Coordinate(o, s, i) for o in range(outer) for s in range(stage) for i in range(inner)))

    @classmethod
    def columns(cls, stages: Sequence[Sequence[int]]) -> Layout:
        """Stages with unequal numbers of workers. stages: the ranks of each stage. The k-th worker of each stage is in
        column k; only the first column is always complete. ValueError unless each rank from 0 on is in one stage.
        """
        coordinates = {rank: Coordinate(k, s, 0) for s, ranks in enumerate(stages) for k, rank in enumerate(ranks)}
        if sorted(coordinates) != list(range(sum(map(len, stages)))):
            raise ValueError(f"stages = {[*map(list, stages)]}: name each of the ranks 0, 1, 2 ... once")
        return cls(tuple(coordinates[rank] for rank in range(len(coordinates))))

    @classmethod
    def rows(cls, lengths: Sequence[int], aside: int = 0) -> Layout:
        """Replicas with unequal numbers of stages, in the order of ranks; then `aside` ranks without a replica."""
        coordinates = [Coordinate(row, stage, 0) for row, length in enumerate(lengths) for stage in range(length)]
        return cls((*coordinates, *(Coordinate(len(coordinates) + rank, 1, 0) for rank in range(aside))))

    @property
    def size(self) -> int:
        return len(self.coordinates)

    def sharing(self, rank: int, *axes: MeshAxis) -> list[int]:
        """The ranks with the same coordinates as `rank` on all `axes`, itself included, ordered by coordinates."""
        key = attrgetter(*axes) if axes else lambda coordinate: ()
        if axes not in self._shared:
            groups: dict[Any, list[int]] = {}
            for other, coordinate in enumerate(self.coordinates):
                groups.setdefault(key(coordinate), []).append(other)
            for ranks in groups.values():
                ranks.sort(key=self.coordinates.__getitem__)
            self._shared[axes] = groups
        return list(self._shared[axes][key(self.coordinates[rank])])

    @cached_property
    def _shared(self) -> dict[tuple[MeshAxis, ...], dict[Any, list[int]]]:
        """Cache of `sharing`, which runs for each of thousands of workers."""
        return {}

    @cached_property
    def holders(self) -> list[list[int]]:
        """The ranks that hold each part of the model, in group order; parts by coordinate in a replica, stage first."""
        first = self.coordinates.index(Coordinate(0, 0, 0))
        return [self.sharing(rank, "stage", "inner") for rank in self.sharing(first, "replica")]

    def reader(self, rank: int) -> tuple[int, int]:
        """(share, shares): the share of the data that `rank` trains on, and the number of shares. The stages of a
        pipeline read the same share. In a column without a first stage no worker reads, and the share is 0.
        """
        shares = sorted(
            {(coordinate.replica, coordinate.inner) for coordinate in self.coordinates if coordinate.stage == 0}
        )
        coordinate = self.coordinates[rank]
        column = (coordinate.replica, coordinate.inner)
        return shares.index(column) if column in shares else 0, len(shares)


@lru_cache(maxsize=8)
def grid_of(workers: int, *, outer: int | None = None, stage: int = 1, inner: int = 1) -> Layout:
    """The grid of all `workers` (outer None: computed). ValueError unless the product of the axes is `workers`."""
    if outer is None:
        outer = max(workers // max(stage * inner, 1), 1)
    layout = Layout.grid(outer, stage, inner)
    if layout.size != workers:
        raise ValueError(
            f"mesh outer={outer} x stage={stage} x inner={inner} is {layout.size} workers, the world has {workers}: "
            "start that many workers or change the mesh"
        )
    return layout
