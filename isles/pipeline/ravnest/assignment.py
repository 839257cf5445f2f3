"""Who serves which stage of which cluster, where nodes are lost, come and leave, and others stand by. Pure: who knows
of the same comes to the same.
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
    """clusters: of each, by stage, the position in the world that serves it, or did. cuts: of each, the first block of
    every stage but the first. standby: positions that stand by, first come first. lost: who is gone. out:
    clusters that are no part of the averaging: somebody of theirs is lost, or their nodes have not loaded the others'
    weights since.

    Where nodes come and leave. descriptors: by position, of those who came. leaving: who wants to
    go, and is still here. handovers: pairs of one that gives its stage up, and one that takes it and does not have its
    state yet.
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
        """At the start, when `positions` fill the clusters in their order: who is in none stands by, and a cluster for
        which too few are left is not. ValueError where there is none.
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
        """From `to_plain`. ValueError for what is no assignment in a world of so many."""
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
        """For a checkpoint, or a message; between two averages, when nobody is handing over."""
        clusters, cuts = list(map(list, self.clusters)), list(map(list, self.cuts))
        descriptors = [[position, number] for position, number in sorted(self.descriptors.items())]
        rest = [sorted(self.lost), sorted(self.out), descriptors, sorted(self.leaving)]
        return [clusters, cuts, list(self.standby), *rest]

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
        assigned = {position for cluster in self.clusters for position in cluster}
        sources = {source for source, _ in self.handovers}
        return sorted((assigned | sources | set(self.standby)) - self.lost)

    def coordinates_of(self, position: int) -> tuple[int, int] | None:
        """(cluster, stage) that it serves; None for one that stands by."""
        for number, cluster in enumerate(self.clusters):
            if position in cluster:
                return number, cluster.index(position)
        return None

    def describe_cluster(self, cluster: int) -> str:
        """Who serves it, and its cuts, for a person."""
        workers, cuts = (
            f"{what}{'s' * (len(row[cluster]) > 1)} {', '.join(map(str, row[cluster]))}"
            for what, row in (("worker", self.clusters), ("block", self.cuts))
        )
        return workers + (f", cut before {cuts}" if self.cuts[cluster] else "")

    def holder(self, cluster: int, stage: int) -> int:
        """Who has the state of a stage: who serves it, or still who gives it."""
        position = self.clusters[cluster][stage]
        return next((source for source, taker in self.handovers if taker == position), position)

    def trains(self, position: int) -> bool:
        coordinates = self.coordinates_of(position)
        return coordinates is not None and coordinates[0] not in self.out

    def without(self, lost: Collection[int]) -> ClusterAssignment:
        """Those are gone, and their clusters out. Who had to give its state to one of them is in its place again."""
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

    def met(self, descriptors: Mapping[int, int], leaving: Collection[int]) -> ClusterAssignment:
        """Those who came stand by, and tell of themselves; others want to go."""
        known = {*self.living, *self.lost}
        came = {position: descriptors[position] for position in sorted(descriptors) if position not in known}
        left = self.leaving | {*leaving}.intersection((*self.living, *came))
        return replace(self, standby=(*self.standby, *came), descriptors={**self.descriptors, **came}, leaving=left)

    def returned(self) -> ClusterAssignment:
        """All who were lost are here again, without what they held: in their old places, or standing by."""
        assigned = {position for cluster in self.clusters for position in cluster}
        return replace(self, standby=(*self.standby, *sorted(self.lost - assigned)), lost=frozenset())

    def renumbered(self, retained: Sequence[int]) -> ClusterAssignment:
        """In a world of those alone, in their order: the clusters that are whole, and who is left of others waits."""
        new, whole = {position: number for number, position in enumerate(retained)}, self._only(self.whole)
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
        """Who stands by takes the places of those who leave, and of the lost, first where the fewest are; a cluster
        that stays without somebody takes nobody. With `growth` those who still wait make new clusters.
        """
        assignment = self._handing(growth)._filled(growth)
        return assignment if growth is None else assignment._grown(growth)

    def joined(self, clusters: Collection[int]) -> ClusterAssignment:
        """Those have the others' weights, and who had to give its state has done so."""
        sources = {source for source, _ in self.handovers}
        return replace(self, out=self.out - set(clusters), handovers=()).without(sources)

    def _handing(self, growth: ClusterGrowth | None) -> ClusterAssignment:
        """Who leaves is gone, but for one who has a successor to give its state to, and the last whole cluster's."""
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

    def _filled(self, growth: ClusterGrowth | None) -> ClusterAssignment:
        assignment = self
        for number in sorted(self.out, key=lambda number: (len(self._missing(number)), number)):
            stages = self._missing(number)
            takers = assignment._takers(number, stages, growth)
            if takers is not None:
                assignment = assignment._assigned(number, stages, takers)
        return assignment

    def _grown(self, growth: ClusterGrowth) -> ClusterAssignment:
        """New clusters, of those who wait and of those with descriptors in clusters that nobody can repair."""
        stuck = [number for number in sorted(self.out) if self._missing(number)]
        left = [p for number in stuck for p in self.clusters[number] if p not in self.lost and self._node(p)]
        free = [*left, *self.standby[: max(0, len(self.standby) - growth.spares)]]
        made = growth.form([self._node(position) for position in free], [self.cuts[number] for number in self.whole])
        if not made:
            return self._only([n for n in range(len(self.clusters)) if not self.lost.issuperset(self.clusters[n])])
        chosen = [tuple(free[number] for number in cluster.nodes) for cluster in made]
        taken = {position for cluster in chosen for position in cluster}
        idle = [p for number in stuck for p in self.clusters[number] if p not in self.lost and p not in taken]
        retained = self._only([number for number in range(len(self.clusters)) if number not in stuck])
        first = len(retained.clusters)
        return replace(
            retained,
            clusters=(*retained.clusters, *chosen),
            cuts=(*retained.cuts, *(cluster.cuts for cluster in made)),
            standby=(*(position for position in self.standby if position not in taken), *idle),
            out=retained.out | set(range(first, first + len(made))),
        )

    def _only(self, clusters: Sequence[int]) -> ClusterAssignment:
        """Without the others, which are no more; numbered anew."""
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
        """Who of those who wait takes these stages, the first that holds each; None where one has nobody."""
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
