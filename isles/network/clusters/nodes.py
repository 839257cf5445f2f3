"""What a node offers, as it says itself: a table [[node]] of a TOML file, which `isles doctor --describe` writes.

[[node]]
name = "desk"
memory = "16GiB"            # that it gives to a run
speed = "120G"              # FLOP/s that a forward pass reaches
bandwidth = "40Mbit/s"      # of its own link, the slower direction
latency = "12ms"            # one way, to the middle of the network; left out: 0

`encode_node` packs it into 8 bytes, so that nodes exchange it in one word: four logarithms.

bit 0        1: a node is there; the number 1 alone says nothing more
15 bits each memory, speed, bandwidth, latency in nanoseconds: 512 log2(1 + amount), so to 0.07 %
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from isles.base.errors import demand
from isles.base.tables import read_toml, typed
from isles.network.units import parse_amount, parse_bytes, parse_latency, parse_rate

_Amount = float | str


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterNode:
    """A machine that may serve a stage.

    Args:
        name: for people.
        memory: bytes.
        speed: FLOP/s of a forward pass.
        bandwidth: bits per second.
        latency: seconds one way to the middle of the network, so that two nodes are as far apart as theirs together.

    Raises:
        ValueError: that begins with the field's name, for a number that cannot be.
    """

    name: str
    memory: float
    speed: float
    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        demand(self, "memory speed bandwidth", lambda x: x > 0, "choose a number above 0")
        demand(self, "latency", lambda x: x >= 0, "choose 0 s or more")

    def to_toml(self) -> str:
        """The table that `read_nodes` reads back."""
        return (
            f'[[node]]\nname = "{self.name}"\nmemory = {round(self.memory)}\nspeed = "{self.speed / 1e9:.4g}G"\n'
            f'bandwidth = "{self.bandwidth / 1e6:.6g}Mbit/s"\nlatency = "{1e3 * self.latency:.4g}ms"\n'
        )


@dataclass(frozen=True, kw_only=True)
class _NodeTable:
    name: str
    memory: _Amount
    speed: _Amount
    bandwidth: _Amount
    latency: _Amount = 0.0


def read_nodes(path: str) -> list[ClusterNode]:
    """The nodes of a file, in its order.

    Args:
        path: of a TOML file of tables [[node]], see `ClusterNode.to_toml`.

    Raises:
        ValueError: in one line that begins with the path, for anything that is wrong.
    """
    tables = read_toml(path)
    try:
        return _nodes(tables)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _nodes(tables: dict[str, Any]) -> list[ClusterNode]:
    found = tables.pop("node", None)
    if tables:
        raise ValueError(f"{next(iter(tables))}: write [[node]] above each node's keys, and nothing else")
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise ValueError("no node: write [[node]] above each node's keys; `isles doctor --describe` writes this one's")
    nodes = [_node(f"node {number}", one) for number, one in enumerate(found, start=1)]
    name, times = Counter(node.name for node in nodes).most_common(1)[0]
    if times > 1:
        raise ValueError(f"name = {name!r} stands for {times} nodes: give each its own")
    return nodes


def _node(where: str, table: dict[str, Any]) -> ClusterNode:
    made: _NodeTable = typed(where, _NodeTable, table)
    try:
        return ClusterNode(
            name=made.name,
            memory=parse_bytes("memory", made.memory),
            speed=parse_amount("speed", made.speed),
            bandwidth=parse_rate("bandwidth", made.bandwidth),
            latency=parse_latency("latency", made.latency),
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


NO_FIGURES = 1
"""Of a node that is there, and tells nothing of itself."""
_BITS, _FINE, _SHIFTS = 15, 512, (1, 16, 31, 46)
_END = 1 << 61


def encode_node(node: ClusterNode | None) -> int:
    """The number, above 0 and below 2**61."""
    if node is None:
        return NO_FIGURES
    amounts = (node.memory, node.speed, node.bandwidth, 1e9 * node.latency)
    codes = (min(round(_FINE * math.log2(1 + amount)), (1 << _BITS) - 1) for amount in amounts)
    return NO_FIGURES | sum(code << shift for code, shift in zip(codes, _SHIFTS, strict=True))


def is_encoded_node(number: int) -> bool:
    """Whether it can be what a node tells."""
    return 0 < number < _END and bool(number & 1)


def decode_node(number: int, name: str) -> ClusterNode | None:
    """The node that tells this; None for one that tells nothing, or has nothing to give."""
    codes = (number >> shift & (1 << _BITS) - 1 for shift in _SHIFTS)
    memory, speed, bandwidth, nanoseconds = (2 ** (code / _FINE) - 1 for code in codes)
    if not min(memory, speed, bandwidth) > 0:
        return None
    return ClusterNode(name=name, memory=memory, speed=speed, bandwidth=bandwidth, latency=nanoseconds / 1e9)
