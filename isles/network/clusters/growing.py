"""New clusters of nodes that came to a run at work: which of them, and cut where.

all tell of themselves     as `form_clusters` groups them, eight at a time, those with the most memory first; the
                           smallest stay out where they are in the way
else                       a cut of a cluster that trains, the shortest first, in the order in which they came
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from isles.network.clusters.forming import EXACT, form_clusters
from isles.network.clusters.nodes import ClusterNode
from isles.network.clusters.splitting import ModelLoad, fill

Cuts = tuple[int, ...]
"""Of a cluster: the first block of each stage but the first."""


class NewCluster(NamedTuple):
    """nodes: by number, in the order of their stages."""

    nodes: tuple[int, ...]
    cuts: Cuts


@dataclass(frozen=True)
class ClusterGrowth:
    """load: of the model. spares: of those who wait so many go on waiting. most: clusters at most, the present ones
    included.
    """

    load: ModelLoad
    spares: int = 0
    most: int = 1 << 20

    def holds(self, node: ClusterNode | None, cuts: Cuts, stage: int) -> bool:
        """Whether a node has the memory for that stage; one that tells nothing is believed to have it."""
        return node is None or fill(self.load, cuts, stage, node) <= 1

    def form(self, nodes: Sequence[ClusterNode | None], present: Sequence[Cuts]) -> list[NewCluster]:
        """The clusters that can be made. present: cuts of those that train."""
        told = [node for node in nodes if node is not None]
        made = self._by_cut(nodes, present) if len(told) < len(nodes) else self._described(told)
        return made[: max(0, self.most - len(present))]

    def _described(self, nodes: Sequence[ClusterNode]) -> list[NewCluster]:
        order = sorted(range(len(nodes)), key=lambda number: (-nodes[number].memory, number))
        made: list[NewCluster] = []
        while order:
            found = self._of_the_largest(nodes, order[:EXACT])
            if not found:
                break
            made += found
            used = {number for cluster in found for number in cluster.nodes}
            order = [number for number in order if number not in used]
        return made

    def _of_the_largest(self, nodes: Sequence[ClusterNode], order: Sequence[int]) -> list[NewCluster]:
        for count in range(len(order), 0, -1):
            chosen = [nodes[number] for number in order[:count]]
            try:
                clusters = form_clusters(chosen, self.load, most=count, method="exact")
            except ValueError:
                continue  # so many do not hold it
            return [NewCluster(tuple(order[n] for n in cluster.nodes), cluster.split.cuts) for cluster in clusters]
        return []

    def _by_cut(self, nodes: Sequence[ClusterNode | None], present: Sequence[Cuts]) -> list[NewCluster]:
        made: list[NewCluster] = []
        free = list(range(len(nodes)))
        for cuts in sorted(set(present), key=lambda cuts: (len(cuts), cuts)):
            while (chosen := self._staffed(nodes, free, cuts)) is not None:
                made.append(NewCluster(chosen, cuts))
                free = [number for number in free if number not in chosen]
        return made

    def _staffed(self, nodes: Sequence[ClusterNode | None], free: Sequence[int], cuts: Cuts) -> tuple[int, ...] | None:
        """For each stage the first that has the memory; None where one has nobody."""
        chosen: list[int] = []
        for stage in range(len(cuts) + 1):
            fits = (n for n in free if n not in chosen and self.holds(nodes[n], cuts, stage))
            found = next(fits, None)
            if found is None:
                return None
            chosen.append(found)
        return tuple(chosen)
