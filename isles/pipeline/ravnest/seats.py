"""Who serves which stage of which cluster, where nodes are lost and others stand by. Pure: who knows of the same losses
comes to the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class ClusterSeats:
    """clusters: of each, by stage, the position in the world that serves it, or did. waiting: positions that stand by,
    in the order of their turn. lost: who is gone. out: clusters that are no part of the averaging: somebody of theirs
    is lost, or their nodes have not loaded the others' weights since.
    """

    clusters: tuple[tuple[int, ...], ...]
    waiting: tuple[int, ...] = ()
    lost: frozenset[int] = frozenset()
    out: frozenset[int] = frozenset()

    @classmethod
    def of(cls, clusters: Sequence[Sequence[int]], size: int) -> ClusterSeats:
        """At the start of a world of so many: who is in none stands by."""
        seated = {position for cluster in clusters for position in cluster}
        waiting = tuple(position for position in range(size) if position not in seated)
        return cls(tuple(map(tuple, clusters)), waiting)

    @classmethod
    def of_plain(cls, plain: Sequence[Any]) -> ClusterSeats:
        """From `to_plain`."""
        clusters, waiting, lost, out = plain
        return cls(tuple(map(tuple, clusters)), tuple(waiting), frozenset(lost), frozenset(out))

    def to_plain(self) -> list[Any]:
        """For a checkpoint."""
        return [list(map(list, self.clusters)), list(self.waiting), sorted(self.lost), sorted(self.out)]

    @property
    def whole(self) -> list[int]:
        """The clusters that train and average, by number."""
        return [number for number in range(len(self.clusters)) if number not in self.out]

    @property
    def complete(self) -> list[int]:
        """The clusters that want the others' weights and nobody else."""
        return [number for number in sorted(self.out) if self.lost.isdisjoint(self.clusters[number])]

    @property
    def living(self) -> list[int]:
        """All positions that are left."""
        seated = {position for cluster in self.clusters for position in cluster}
        return sorted((seated | set(self.waiting)) - self.lost)

    def place(self, position: int) -> tuple[int, int] | None:
        """(cluster, stage) that it serves; None for one that stands by."""
        for number, cluster in enumerate(self.clusters):
            if position in cluster:
                return number, cluster.index(position)
        return None

    def trains(self, position: int) -> bool:
        """Whether its cluster is whole."""
        place = self.place(position)
        return place is not None and place[0] not in self.out

    def without(self, lost: Collection[int]) -> ClusterSeats:
        """Those are gone, and their clusters out."""
        hit = {number for number, cluster in enumerate(self.clusters) if not set(cluster).isdisjoint(lost)}
        waiting = tuple(position for position in self.waiting if position not in lost)
        return replace(self, waiting=waiting, lost=self.lost | set(lost), out=self.out | hit)

    def returned(self) -> ClusterSeats:
        """All who were lost are here again, without what they held: in their old places, or standing by."""
        seated = {position for cluster in self.clusters for position in cluster}
        return replace(self, waiting=(*self.waiting, *sorted(self.lost - seated)), lost=frozenset())

    def mended(self) -> ClusterSeats:
        """Who stands by takes the places of the lost, first where the fewest are; a cluster that stays without somebody
        takes nobody.
        """
        clusters, waiting = list(self.clusters), list(self.waiting)

        def missing(number: int) -> list[int]:
            return [stage for stage, position in enumerate(clusters[number]) if position in self.lost]

        for number in sorted(self.out, key=lambda number: (len(missing(number)), number)):
            stages = missing(number)
            if len(stages) <= len(waiting):
                cluster = list(clusters[number])
                for stage in stages:
                    cluster[stage] = waiting.pop(0)
                clusters[number] = tuple(cluster)
        return replace(self, clusters=tuple(clusters), waiting=tuple(waiting))

    def joined(self, clusters: Collection[int]) -> ClusterSeats:
        """Those have the others' weights."""
        return replace(self, out=self.out - set(clusters))
