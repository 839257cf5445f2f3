"""Which node serves which stage of which cluster, as nodes are lost, join, leave and wait on standby. Pure functions:
equal inputs give equal assignments on all nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from isles.base.parsing import MANY, Int, Ints, Unfit, read
from isles.network.clusters import ClusterGrowth, ClusterNode, Cuts, decode_node, is_encoded_node

_Rows = Annotated[tuple[Ints, ...], MANY]
_Set = Annotated[frozenset[Int], MANY]
_Plain = tuple[_Rows, _Rows, Ints, _Set, _Set, Annotated[tuple[tuple[Int, Int], ...], MANY], _Set]


@dataclass(frozen=True, slots=True)
class ClusterAssignment:
    """clusters: for each cluster, by stage, the position in the world that serves it, or served it before its loss.
    cuts: for each cluster, the first block of every stage but the first. standby: positions on standby, oldest first.
    lost: positions that are lost. out: indices of the clusters that do not average: a node of theirs is lost, or they
    have not loaded the others' weights since it was replaced.

    In worlds that nodes join and leave. descriptors: by position, of the nodes that joined. leaving: positions that
    asked to leave and are still here. handovers: pairs (source, taker) of nodes that hand a stage's state over.
    """

    clusters: tuple[tuple[int, ...], ...]
    cuts: tuple[Cuts, ...]
    standby: tuple[int, ...] = ()
    lost: frozenset[int] = frozenset()
    out: frozenset[int] = frozenset()
    descriptors: Mapping[int, int] = field(default_factory=dict)
    leaving: frozenset[int] = frozenset()
    handovers: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, cuts: Sequence[Sequence[int]], positions: Sequence[int]) -> ClusterAssignment:
        """The assignment at the start: `positions` fill the clusters in order. A cluster that the remaining positions
        cannot fill is omitted; positions left over are standby. ValueError if no cluster is filled.
        """
        free, made = list(positions), ClusterAssignment((), ())
        for own in cuts:
            if len(own) < len(free):
                clusters = (*made.clusters, tuple(free[: len(own) + 1]))
                made = replace(made, clusters=clusters, cuts=(*made.cuts, tuple(own)))
                free = free[len(own) + 1 :]
        if not made.clusters:
            raise ValueError(f"{len(free)} nodes fill no cluster: the smallest has {min(map(len, cuts)) + 1}")
        return replace(made, standby=tuple(free))

    @classmethod
    def of_plain(cls, plain: Any, size: int) -> ClusterAssignment:
        """Decode `to_plain`. ValueError if it is no assignment in a world of `size` positions."""
        try:
            clusters, cuts, standby, lost, out, descriptors, leaving = read(_Plain, plain, "assignment")
        except Unfit:
            raise ValueError("no assignment of clusters") from None
        made = cls(clusters, cuts, standby, lost, out, dict(descriptors), leaving)
        assigned = [position for cluster in made.clusters for position in cluster]
        named = [*assigned, *made.standby, *made.lost, *made.descriptors, *made.leaving]
        fits = (
            all(0 <= position < size for position in named)
            and len({*assigned, *made.standby}) == len(assigned) + len(made.standby)
            and [len(own) + 1 for own in made.cuts] == list(map(len, made.clusters))
            and made.out <= set(range(len(made.clusters)))
            and all(map(is_encoded_node, made.descriptors.values()))
        )
        if not fits:
            raise ValueError("no assignment of clusters")
        return made

    def to_plain(self) -> list[Any]:
        """Encode for a checkpoint or a message. Call it between two averages: handovers are not encoded."""
        clusters, cuts = list(map(list, self.clusters)), list(map(list, self.cuts))
        descriptors = [[position, number] for position, number in sorted(self.descriptors.items())]
        rest = [sorted(self.lost), sorted(self.out), descriptors, sorted(self.leaving)]
        return [clusters, cuts, list(self.standby), *rest]

    @property
    def whole(self) -> list[int]:
        """Indices of the clusters that train and average."""
        return [number for number in range(len(self.clusters)) if number not in self.out]

    @property
    def complete(self) -> list[int]:
        """Clusters that have all their nodes and still have to load the others' weights."""
        return [number for number in sorted(self.out) if self.lost.isdisjoint(self.clusters[number])]

    @property
    def living(self) -> list[int]:
        assigned = {position for cluster in self.clusters for position in cluster}
        sources = {source for source, _ in self.handovers}
        return sorted((assigned | sources | set(self.standby)) - self.lost)

    def coordinates_of(self, position: int) -> tuple[int, int] | None:
        """(cluster, stage) that `position` serves; None on standby."""
        for number, cluster in enumerate(self.clusters):
            if position in cluster:
                return number, cluster.index(position)
        return None

    def describe_cluster(self, cluster: int) -> str:
        """The cluster's workers and cuts, as text for users."""
        workers, cuts = (
            f"{what}{'s' * (len(row[cluster]) > 1)} {', '.join(map(str, row[cluster]))}"
            for what, row in (("worker", self.clusters), ("block", self.cuts))
        )
        return workers + (f", cut before {cuts}" if self.cuts[cluster] else "")

    def holder(self, cluster: int, stage: int) -> int:
        """The position that has the state of a stage: the one that serves it, or the source of an open handover."""
        position = self.clusters[cluster][stage]
        return next((source for source, taker in self.handovers if taker == position), position)

    def trains(self, position: int) -> bool:
        coordinates = self.coordinates_of(position)
        return coordinates is not None and coordinates[0] not in self.out

    def without(self, lost: Collection[int]) -> ClusterAssignment:
        """Remove `lost`; their clusters no longer average. The source of a handover to one of them serves its stage
        again.
        """
        back = {taker: source for source, taker in self.handovers if taker in lost and source not in lost}
        orphans = {taker for source, taker in self.handovers if source in lost}
        clusters = tuple(tuple(back.get(position, position) for position in own) for own in self.clusters)
        hit = {number for number, own in enumerate(clusters) if not orphans.union(lost).isdisjoint(own)}
        return replace(
            self,
            clusters=clusters,
            standby=tuple(position for position in self.standby if position not in lost),
            lost=self.lost | set(lost),
            out=self.out | hit,
            descriptors={position: number for position, number in self.descriptors.items() if position not in lost},
            leaving=self.leaving - set(lost),
            handovers=tuple(pair for pair in self.handovers if not {*pair} & set(lost)),
        )

    def with_joiners(self, descriptors: Mapping[int, int], leaving: Collection[int]) -> ClusterAssignment:
        """Add the new nodes of `descriptors` to the standby ones, and record which nodes want to leave."""
        known = {*self.living, *self.lost}
        came = {position: descriptors[position] for position in sorted(descriptors) if position not in known}
        left = self.leaving | {*leaving}.intersection((*self.living, *came))
        return replace(self, standby=(*self.standby, *came), descriptors={**self.descriptors, **came}, leaving=left)

    def with_returned(self) -> ClusterAssignment:
        """All lost nodes are back, without their state: in their former stages, or else on standby."""
        assigned = {position for cluster in self.clusters for position in cluster}
        return replace(self, standby=(*self.standby, *sorted(self.lost - assigned)), lost=frozenset())

    def renumbered(self, retained: Sequence[int]) -> ClusterAssignment:
        """The assignment in a world of the positions `retained` only, renumbered in that order. Clusters that average
        stay; remaining nodes of the others become standby.
        """
        new, whole = {position: number for number, position in enumerate(retained)}, self._select(self.whole)
        assigned = {position for own in whole.clusters for position in own}
        idle = [position for own in self.clusters for position in own if position not in assigned and position in new]
        return replace(
            whole,
            clusters=tuple(tuple(new[position] for position in own) for own in whole.clusters),
            standby=tuple(new[position] for position in (*self.standby, *idle)),
            lost=frozenset(),
            descriptors={new[position]: number for position, number in self.descriptors.items()},
            leaving=frozenset(),
        )

    def repaired(self, growth: ClusterGrowth | None = None) -> ClusterAssignment:
        """Standby nodes replace leaving nodes, then lost ones: clusters that lack the fewest nodes come first, and one
        that cannot be completed takes none. With `growth` the remaining standby nodes form new clusters.
        """
        assignment = self._with_handovers(growth)._with_replacements(growth)
        return assignment if growth is None else assignment._with_new_clusters(growth)

    def with_loaded(self, clusters: Collection[int]) -> ClusterAssignment:
        """`clusters` have loaded the others' weights and average again; all handovers are complete."""
        sources = {source for source, _ in self.handovers}
        return replace(self, out=self.out - set(clusters), handovers=()).without(sources)

    def _with_handovers(self, growth: ClusterGrowth | None) -> ClusterAssignment:
        """Remove leaving nodes, except those that hand over to a successor and those of the last whole cluster."""
        assignment = self.without([position for position in self.leaving if not self.trains(position)])
        for number in [
            number for number in assignment.whole if not assignment.leaving.isdisjoint(assignment.clusters[number])
        ]:
            stages = [stage for stage, own in enumerate(assignment.clusters[number]) if own in assignment.leaving]
            takers = assignment._takers(number, stages, growth)
            if takers is not None:
                sources = [assignment.clusters[number][stage] for stage in stages]
                assignment = replace(
                    assignment._assigned(number, stages, takers),
                    handovers=(*assignment.handovers, *zip(sources, takers, strict=True)),
                )
            elif len(assignment.whole) > 1:
                assignment = assignment.without(assignment.leaving.intersection(assignment.clusters[number]))
        return assignment

    def _with_replacements(self, growth: ClusterGrowth | None) -> ClusterAssignment:
        assignment = self
        for number in sorted(self.out, key=lambda number: (len(self._missing(number)), number)):
            stages = self._missing(number)
            takers = assignment._takers(number, stages, growth)
            if takers is not None:
                assignment = assignment._assigned(number, stages, takers)
        return assignment

    def _with_new_clusters(self, growth: ClusterGrowth) -> ClusterAssignment:
        """Form new clusters of the standby nodes and of the nodes with descriptors in clusters that lack a node."""
        stuck = [number for number in sorted(self.out) if self._missing(number)]
        left = [p for number in stuck for p in self.clusters[number] if p not in self.lost and self._node(p)]
        free = [*left, *self.standby[: max(0, len(self.standby) - growth.spares)]]
        made = growth.form([self._node(position) for position in free], [self.cuts[number] for number in self.whole])
        if not made:
            return self._select([n for n in range(len(self.clusters)) if not self.lost.issuperset(self.clusters[n])])
        chosen = [tuple(free[number] for number in cluster.nodes) for cluster in made]
        taken = {position for cluster in chosen for position in cluster}
        idle = [p for number in stuck for p in self.clusters[number] if p not in self.lost and p not in taken]
        retained = self._select([number for number in range(len(self.clusters)) if number not in stuck])
        first = len(retained.clusters)
        return replace(
            retained,
            clusters=(*retained.clusters, *chosen),
            cuts=(*retained.cuts, *(cluster.cuts for cluster in made)),
            standby=(*(position for position in self.standby if position not in taken), *idle),
            out=retained.out | set(range(first, first + len(made))),
        )

    def _select(self, clusters: Sequence[int]) -> ClusterAssignment:
        """Keep `clusters` only, and renumber them."""
        return replace(
            self,
            clusters=tuple(self.clusters[number] for number in clusters),
            cuts=tuple(self.cuts[number] for number in clusters),
            out=frozenset(new for new, number in enumerate(clusters) if number in self.out),
        )

    def _node(self, position: int) -> ClusterNode | None:
        return decode_node(self.descriptors.get(position, 1), f"worker {position}")

    def _missing(self, number: int) -> list[int]:
        return [stage for stage, position in enumerate(self.clusters[number]) if position in self.lost]

    def _takers(self, number: int, stages: Sequence[int], growth: ClusterGrowth | None) -> list[int] | None:
        """The standby node that takes each of `stages`: the first that can hold it. None if a stage has none."""
        takers: list[int] = []
        for stage in stages:
            found = next(self._able(number, stage, takers, growth), None)
            if found is None:
                return None
            takers.append(found)
        return takers

    def _able(self, number: int, stage: int, taken: Sequence[int], growth: ClusterGrowth | None) -> Iterator[int]:
        for position in self.standby:
            if position in taken or position in self.leaving:
                continue
            if growth is None or growth.holds(self._node(position), self.cuts[number], stage):
                yield position

    def _assigned(self, number: int, stages: Sequence[int], takers: Sequence[int]) -> ClusterAssignment:
        own, clusters = list(self.clusters[number]), list(self.clusters)
        for stage, taker in zip(stages, takers, strict=True):
            own[stage] = taker
        clusters[number] = tuple(own)
        standby = tuple(position for position in self.standby if position not in takers)
        return replace(self, clusters=tuple(clusters), standby=standby)
