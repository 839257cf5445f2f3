"""A step of the executor on the virtual clock, against the replay of its orders: a function that runs nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import isles
from isles.network.links import Links, Topology, links
from isles.network.routing.events import Task, in_flight, orders
from isles.network.routing.replay import LinkWire, Sizes, TaskSeconds, in_order, replay
from tests.pipeline import workers
from tests.pipeline.workers import Cell

NETWORKS = {
    "late": Links(bandwidth=float("inf"), latency=0.6),
    "cable": links("home-cable"),
    "shared": Links(bandwidth=[2e4, 4e4], latency=0.1, uplinks=[0, 0, 0, 1, 1, 1]),
    "narrow": Links(bandwidth=3e4, downlink=[1e4, 2e4, 3e4], latency=0.2, uplinks=[0, 0, 1, 1, 2, 2]),
}

CELLS = [Cell(3, 2, 4, "random"), Cell(3, 2, 5, home=True, limit="1f1b"), Cell(2, 3, 3, "random", home=True)]


def seconds_of(cell: Cell) -> TaskSeconds:
    """Of stages that differ."""
    forward = [1.0 + 0.3 * stage for stage in range(cell.stages)] * cell.replicas
    return TaskSeconds(forward=forward, loss=[0.25] * len(forward), backward=[2.1 * one for one in forward])


def clocks(world: Any, cell: Cell) -> tuple[float, dict[str, int]]:
    """When this worker was done, and the bytes of its messages by kind."""
    torch.set_num_threads(1)
    run = workers.executor(world, cell, seconds_of(cell))
    run.step(1, workers.own_text(cell, world.rank, 1))
    return world.transport.now(), {kind: run.form.nbytes(Task(kind, 0, 0)) for kind in ("F", "L", "B")}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    "cell",
    [Cell(3, 2, 4, "random"), Cell(3, 2, 5, home=True, limit="1f1b"), Cell(2, 3, 3, "random", home=True)],
    ids=str,
)
def test_a_step_takes_what_its_replay_takes(cell: Cell, name: str) -> None:
    network = NETWORKS[name]
    done = isles.run_virtual(clocks, 6, links=network, args=(cell,), step_seconds=1.0, compute_jitter=0.0, seed=3)
    sizes = Sizes(forward=done[0][1]["F"], home=done[0][1]["L"], backward=done[0][1]["B"])
    routes = cell.router()(1)
    lists = orders(routes, in_flight(cell.limit, cell.replicas, cell.stages))
    wire = LinkWire(Topology(6, network), sizes, seed=3)
    played = replay(routes, seconds_of(cell), wire, in_order(lists))
    assert max(now for now, _ in done) == pytest.approx(played.makespan, rel=0, abs=1e-9)
    free = (cell.microbatches + cell.stages - 1) * sum(seconds_of(cell).forward[: cell.stages]) / cell.stages
    assert played.makespan > free  # the network acts
