"""Who averages what with whom, where clusters are cut at different blocks: the common refinement of their cuts.

    cluster 0     | a b c | d e f |           holders of a, b: (0, 2, 5)       of d: (1, 3, 5)
    cluster 1     | a b | c d e | f |                       c: (0, 3, 5)         e: (1, 3, 5)     f: (1, 4, 5)
    cluster 2     | a b c d e f |

Parameters that the same nodes hold are one segment, of which each cluster has exactly one holder. Segments are averaged
at the same time, each over its holders: Ravnest's parallel rings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """holders: one node of each cluster, in the order of the clusters. names: of parameters, in the model's order."""

    holders: tuple[int, ...]
    names: tuple[str, ...]


def refinement(clusters: Sequence[Mapping[int, Sequence[str]]]) -> list[SharedSegment]:
    """The segments, in the order of their holders. clusters: of each, by node, the names of the parameters that it
    holds. ValueError where a cluster holds a parameter twice, or not what the first one does.
    """
    order = [name for names in clusters[0].values() for name in names]
    homes = [_homes(number, cluster) for number, cluster in enumerate(clusters)]
    for number, own in enumerate(homes):
        odd = own.keys() ^ homes[0].keys()
        if odd:
            raise ValueError(f"cluster {number} and cluster 0 do not hold the same parameters: {min(odd)!r} is in one")
    found: dict[tuple[int, ...], list[str]] = {}
    for name in order:
        found.setdefault(tuple(own[name] for own in homes), []).append(name)
    return [SharedSegment(holders, tuple(names)) for holders, names in sorted(found.items())]


def _homes(number: int, cluster: Mapping[int, Sequence[str]]) -> dict[str, int]:
    homes: dict[str, int] = {}
    for node, names in cluster.items():
        for name in names:
            if name in homes:
                raise ValueError(f"cluster {number} holds {name!r} at nodes {homes[name]} and {node}: it lies at one")
            homes[name] = node
    return homes
