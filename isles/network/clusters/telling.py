"""What a node tells of itself in 8 bytes, so that it fits into words that all swap: four logarithms.

bit 0        1: somebody is there; the number 1 alone tells nothing more
15 bits each memory, speed, bandwidth, latency in nanoseconds: 512 log2(1 + amount), so to 0.07 %
"""

from __future__ import annotations

import math

from isles.network.clusters.nodes import ClusterNode

SILENT = 1
"""Of a node that is there, and tells nothing of itself."""
_BITS, _FINE, _SHIFTS = 15, 512, (1, 16, 31, 46)
_END = 1 << 61


def told(node: ClusterNode | None) -> int:
    """The number, above 0 and below 2**61."""
    if node is None:
        return SILENT
    amounts = (node.memory, node.speed, node.bandwidth, 1e9 * node.latency)
    codes = (min(round(_FINE * math.log2(1 + amount)), (1 << _BITS) - 1) for amount in amounts)
    return SILENT | sum(code << shift for code, shift in zip(codes, _SHIFTS, strict=True))


def is_told(number: int) -> bool:
    """Whether it can be what a node tells."""
    return 0 < number < _END and bool(number & 1)


def heard(number: int, name: str) -> ClusterNode | None:
    """The node that tells this; None for one that tells nothing, or has nothing to give."""
    codes = (number >> shift & (1 << _BITS) - 1 for shift in _SHIFTS)
    memory, speed, bandwidth, nanoseconds = (2 ** (code / _FINE) - 1 for code in codes)
    if not min(memory, speed, bandwidth) > 0:
        return None
    return ClusterNode(name=name, memory=memory, speed=speed, bandwidth=bandwidth, latency=nanoseconds / 1e9)
