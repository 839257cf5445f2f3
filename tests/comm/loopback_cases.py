"""Runs whose counted bytes are compared with what the loopback interface saw. Called inside a network namespace."""

from __future__ import annotations

import torch
from torch import nn

import isles
from isles.comm.codecs import codec
from isles.comm.mean import Stamp, mean
from isles.comm.mesh import Mesh
from tests.netns import on_the_wire

WORKERS = 4
STEPS = 4


def one_mean(world: Mesh, name: str, elements: int) -> tuple[int, int]:
    buffer = torch.randn(elements, generator=torch.Generator().manual_seed(world.rank))
    world.outer.start(mean(world.outer.call("outer", 0), buffer, codec(name), Stamp(0)), "outer").wait()
    return totals(world)


def one_verb(world: Mesh, name: str, elements: int) -> tuple[int, int]:
    group, x = world.world, torch.zeros(elements)
    if name == "all_gather":
        group.all_gather(x)
    elif name == "all_to_all":
        group.all_to_all([x] * WORKERS, [torch.empty_like(x) for _ in range(WORKERS)])
    elif name == "exchange":
        group.exchange(world.rank ^ 1, x)
    elif name == "broadcast":
        group.broadcast(x, 1)
    elif world.rank == 0:
        for _ in range(WORKERS - 1):
            group.receive()
    else:
        group.post(0, bytes(4 * elements)).wait()
    return totals(world)


def trained(world: Mesh, name: str) -> tuple[int, int]:
    """A few steps of a method on a plain model of 0.33 million parameters, to its consolidated end."""
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 20))
    options = {} if name in ("none", "ddp") else {"sync_every": 2}
    optimizer = isles.method(name)(model, torch.optim.SGD(model.parameters(), lr=0.01), world.outer, **options)
    for _ in range(STEPS):
        model(torch.randn(8, 400)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate()
    return totals(world)


def totals(world: Mesh) -> tuple[int, int]:
    traffic = world.world.traffic
    return int(traffic.total("bytes_sent")), int(traffic.total("bytes_received"))


def compared(kind: str, names: list[str], *arguments: object) -> dict[str, dict[str, int]]:
    """For each name: bytes counted by the workers as sent and as received; on the wire: payload, and with headers."""
    worker = {"mean": one_mean, "verb": one_verb, "method": trained}[kind]
    answer = {}
    for name in names:
        counts, wire = on_the_wire(lambda name=name: isles.run_local(worker, WORKERS, args=(name, *arguments)))
        sent, received = (sum(side) for side in zip(*counts, strict=True))
        answer[name] = {"sent": sent, "received": received, "wire": wire.payload, "with headers": wire.bytes}
    return answer
