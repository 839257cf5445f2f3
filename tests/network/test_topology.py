"""Lines inside islands and between them."""

from __future__ import annotations

import pytest
import torch

import isles
from isles.comm.mesh import Mesh
from isles.network.links import Links, Topology

FAR = Links(bandwidth=1e6, latency=0.1, uplinks=[0, 0, 1, 1])
NEAR = Links(bandwidth=1e9, latency=0.001)


def test_neighbours_have_ports_of_their_own() -> None:
    routes = Topology(4, FAR, NEAR, island=2)
    assert routes.rates == [1e6, 1e6, 1e9, 1e9, 1e9, 1e9]
    assert [routes.up(source, target) for source, target in ((0, 1), (1, 0), (0, 2), (3, 1), (3, 2))] == [2, 3, 0, 1, 5]
    assert routes.down(0, 1) is None and routes.down(0, 2) == 1
    assert routes.latency(2, 3, number=0, seed=0) == 0.001 and routes.latency(1, 3, number=0, seed=0) == 0.1


def test_without_islands_all_is_far() -> None:
    for routes in (Topology(4, FAR), Topology(4, FAR, NEAR, island=1)):
        assert routes.rates == [1e6, 1e6] and routes.up(0, 1) == 0 and not routes.is_near(0, 1)
    with pytest.raises(ValueError, match="a port of its own"):
        Topology(4, FAR, Links(bandwidth=1e9, uplinks=[0, 0, 1, 1]), island=2)
    with pytest.raises(ValueError, match="choose a divisor"):
        Topology(4, FAR, NEAR, island=3)


def clocks(world: Mesh) -> tuple[float, float]:
    """Arrivals of 125,000 bytes (a megabit) from the neighbour, then from the other island."""
    data = torch.zeros(125_000, dtype=torch.uint8)
    islands = isles.mesh(inner=2)
    islands.inner.exchange(1 - islands.inner.rank, data)
    inside = world.transport.now()
    islands.outer.exchange(1 - islands.outer.rank, data)
    return inside, world.transport.now() - inside


def test_the_virtual_clock_charges_each_way() -> None:
    """Inside: a megabit at 1 Gbit/s and 1 ms. Across: two workers of an island share its uplink of 1 Mbit/s."""
    for inside, across in isles.run_virtual(clocks, 4, links=FAR, inner=2, inner_links=NEAR):
        assert inside == pytest.approx(0.002)
        assert across == pytest.approx(2.1)
