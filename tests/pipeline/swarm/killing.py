"""Death of virtual workers at a message of their own: what is on their lines is lost, the others hear of it at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

import isles
from isles.comm.errors import PeerLost
from isles.comm.mesh import Mesh
from isles.comm.tags import Tag
from isles.comm.virtual.cluster import VirtualTransport
from isles.network.engine import ARRIVED


def doomed(world: Mesh, worker: Callable[..., Any], args: tuple[Any, ...], deaths: Mapping[int, int]) -> Any:
    """`worker(world, *args)`; a rank in `deaths` dies before it sends or posts the message of that number, from 0.
    Returns its result and the messages that it sent or posted.
    """
    transport: Any = world.transport
    assert isinstance(transport, VirtualTransport)
    count = 0

    def counted(verb: Callable[..., Any]) -> Callable[[int | None, Tensor, Tag], Any]:
        def act(peer: int | None, data: Tensor, tag: Tag) -> Any:
            nonlocal count
            count += 1
            if deaths.get(world.rank) == count - 1:
                die(world)
            return verb(peer, data, tag)

        return act

    transport.send, transport.recv = counted(transport.send), counted(transport.recv)
    return worker(world, *args), count


def die(world: Mesh) -> None:
    """Now: whatever this worker does next, it does not."""
    transport: Any = world.transport
    rank, wire, scheduler, worker = world.rank, transport._wire, transport._scheduler, transport._worker

    def end() -> None:
        wire.dead(rank)
        transport.abandon(PeerLost(rank, "it died"))
        scheduler.kill(worker)
        wire.cut(rank, "its connection broke")

    with worker:
        scheduler.timeline.at(scheduler.timeline.now, ARRIVED, rank, end)


def run(worker: Callable[..., Any], workers: int, args: tuple[Any, ...], deaths: Mapping[int, int], **more: Any) -> Any:
    """By rank, what `doomed` returns; None of the dead."""
    more = {"links": isles.Links(bandwidth=1e7, latency=0.02, jitter=0.8), "step_seconds": 0.3} | more
    return isles.run_virtual(doomed, workers, args=(worker, args, deaths), **more)
