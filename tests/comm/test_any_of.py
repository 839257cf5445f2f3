"""A protocol that serves whoever comes first: the same order, and the same moments, on both backends."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch

import isles
from isles.comm.mesh import Mesh
from isles.comm.tags import Tag
from isles.comm.transport import AnyOf, NativeCollectives, Steps
from tests.gloo import run_gloo

TAG = Tag("pipeline", 7)
AFTER = (0.0, 0.6, 0.2, 0.4)
"""Seconds after which each worker sends its message."""
backends = pytest.mark.parametrize("run", [isles.run_virtual, isles.run_local])


def first_come(world: Mesh, loses: int | None) -> Any:
    """Worker 0 takes what the others send as it comes: whom it served and when, whom it lost. `loses` ends silently."""
    group, transport = world.world, world.transport
    group.barrier()
    began = transport.now()
    if world.rank == 0:
        served, lost = group.start(_serve(world), "pipeline", 30.0).wait()
        return [(peer, at - began) for peer, at in served], lost
    transport.compute(AFTER[world.rank])
    time.sleep(AFTER[world.rank] if transport.native else 0.0)
    if world.rank == loses:
        raise KeyError("gone")
    group.start(_send(world), "pipeline").wait()
    return None


def _serve(world: Mesh) -> Steps[tuple[list[tuple[int, float]], list[int]]]:
    served, lost = [], []
    outs = {peer: torch.zeros(3, dtype=torch.uint8) for peer in (1, 2, 3)}
    works = {peer: world.transport.recv(peer, out, TAG) for peer, out in outs.items()}
    assert all(work.at == math.inf and work.error is None for work in works.values())
    while works:
        try:
            yield AnyOf(list(works.values()))
        except isles.PeerLost as error:
            assert works.pop(error.rank).error is error
            lost.append(error.rank)
        for peer in [peer for peer, work in works.items() if work.done() and work.error is None]:
            assert outs[peer].tolist() == [peer] * 3
            served.append((peer, works.pop(peer).at))
    return served, lost


def _send(world: Mesh) -> Steps[None]:
    yield world.transport.send(0, torch.full((3,), world.rank, dtype=torch.uint8), TAG)


@backends
@pytest.mark.parametrize("loses", [None, 3])
def test_whoever_comes_first_is_served_first(run: Any, loses: int | None) -> None:
    """A lost one is raised once and left out; the others are served."""
    if run is isles.run_local and loses is None:
        served, lost = run_gloo(first_come, 4, args=(loses,))[0]
    else:
        served, lost = run(first_come, 4, args=(loses,), return_errors=True)[0]
    assert [peer for peer, _ in served] == [peer for peer in (2, 3, 1) if peer != loses]
    assert lost == [loses] * (loses is not None)
    for peer, at in served:
        assert at == pytest.approx(AFTER[peer], abs=0.3)


def nothing(world: Mesh) -> Any:
    def steps() -> Steps[str]:
        yield AnyOf([])
        return "went on"

    return world.world.start(steps(), "control", 1.0).wait()


@backends
def test_of_nothing_it_goes_on_at_once(run: Any) -> None:
    assert run(nothing, 1) == ["went on"]


def native(world: Mesh) -> tuple[bool, bool]:
    return world.transport.native, isinstance(world.transport, NativeCollectives)


@backends
def test_a_transport_says_whether_it_has_collectives_of_its_own(run: Any) -> None:
    assert run(native, 1) == [(run is isles.run_local,) * 2]
