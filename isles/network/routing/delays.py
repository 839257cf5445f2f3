"""Seconds of a microbatch between every two nodes, from the lines between them; what tells one network from another."""

from __future__ import annotations

import hashlib
import json
from statistics import median

from isles.network.links import Links

_SLIP = 50
"""Times the median from which on a way is probably a slip of whoever wrote the table."""


def delays_of(links: Links, nodes: int, nbytes: float, overhead: float = 0.0) -> tuple[tuple[float, ...], ...]:
    """[source][target]: seconds of a message of `nbytes` that is alone on the way, its mean latency and `overhead` (the
    copies at both ends) included; 0 from a node to itself. ValueError where `links` do not connect so many.
    """
    links.check(nodes)
    return tuple(
        tuple(
            0.0
            if source == target
            else links.base_latency(source, target) + 8 * nbytes / links.way_rate(source, target) + overhead
            for target in range(nodes)
        )
        for source in range(nodes)
    )


def slips(delays: tuple[tuple[float, ...], ...]) -> list[str]:
    """A line for each way that takes over 50 times as long as the median one."""
    ways = {(u, v): delay for u, row in enumerate(delays) for v, delay in enumerate(row) if u != v}
    usual = median(ways.values()) if ways else 0.0
    return [
        f"the way from {u} to {v} takes {delay:.3g} s, {delay / usual:.0f} times the median: check the table"
        for (u, v), delay in ways.items()
        if delay > _SLIP * usual
    ]


def fingerprint(links: Links, nodes: int) -> str:
    """Sixteen letters that tell whether two networks are the same: rates and latencies of all ways, what is shared."""
    ways = [(source, target) for source in range(nodes) for target in range(nodes) if source != target]
    known = {
        "ways": [[links.way_rate(*way), links.base_latency(*way)] for way in ways],
        "lines": [links.line_of(*way) for way in ways],
        "jitter": links.jitter,
    }
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
