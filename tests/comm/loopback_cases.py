"""Runs whose counted bytes are compared with what the loopback interface saw. Called inside a network namespace."""

from __future__ import annotations

import torch
from torch import nn

import isles
from isles.comm.codecs import codec
from isles.comm.collectives.basic import Stamp
from isles.comm.collectives.mean import mean
from isles.comm.mesh import Mesh
from isles.models import Decoder, Shape
from isles.pipeline.config import PipelineConfig
from tests.netns import Wire, counted_so_far

WORKERS = 4
PAYLOAD = 4_000_000  # bytes that one worker contributes
STEPS = 4


def compared(wanted: dict[str, list[str]]) -> dict[str, dict[str, tuple[int, int, Wire]]]:
    """By kind and name: bytes counted by all workers as sent and as received, and what the interface saw."""
    ranks = isles.run_local(all_cases, WORKERS, args=(wanted,))
    return {
        kind: {
            name: (sum(rank[kind][name][0] for rank in ranks), sum(rank[kind][name][1] for rank in ranks), wire)
            for name, (_, _, wire) in ranks[0][kind].items()
        }
        for kind in wanted
    }


def all_cases(world: Mesh, wanted: dict[str, list[str]]) -> dict[str, dict[str, tuple[int, int, Wire]]]:
    """By kind."""
    return {kind: cases(world, kind, names) for kind, names in wanted.items()}


def cases(world: Mesh, kind: str, names: list[str]) -> dict[str, tuple[int, int, Wire]]:
    """Every case between two barriers: this worker's bytes sent and received, and all that crossed meanwhile."""
    action = {"mean": one_mean, "verb": one_verb, "method": trained, "pipeline": piped}[kind]
    traffic, answer = world.world.traffic, {}
    for name in names:
        world.world.barrier()
        start = traffic.total("bytes_sent"), traffic.total("bytes_received"), counted_so_far()
        world.world.barrier()
        action(world, name)
        world.world.barrier()
        wire = counted_so_far() - start[2]
        sent, received = traffic.total("bytes_sent") - start[0], traffic.total("bytes_received") - start[1]
        answer[name] = (int(sent), int(received), wire)
    return answer


def one_mean(world: Mesh, name: str) -> None:
    form = codec(name)
    elements = PAYLOAD // form.wire_bytes(4096, torch.float32) * 4096 + 1
    buffer = torch.randn(elements, generator=torch.Generator().manual_seed(world.rank))
    world.outer.start(mean(world.outer.call("outer", 0), buffer, form, Stamp(0)), "outer").wait()


def one_verb(world: Mesh, name: str) -> None:
    group, x = world.world, torch.zeros(PAYLOAD // 4 + 1)
    if name == "all_gather":
        group.all_gather(x)
    elif name == "all_to_all":
        group.all_to_all([x] * WORKERS, [torch.empty_like(x) for _ in range(WORKERS)])
    elif name == "exchange":
        group.exchange(world.rank ^ 1, x)
    elif name == "broadcast":
        group.broadcast(x, 1)


def trained(world: Mesh, name: str) -> None:
    """A few steps of a method on a plain model of 0.73 million parameters, to its consolidated end."""
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 20))
    group, inside = world.outer, None
    if name == "islands":  # DiLoCo across, FSDP inside
        name, world = "diloco", isles.mesh(inner=2)
        group, inside = world.outer, isles.FSDP
    kind = isles.method(name)
    model = (inside or kind).local_part(model, world.inner if inside else group, (inside or kind).Config())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if inside:
        optimizer = inside(model, optimizer, world.inner)
    options = {} if name in ("none", "ddp", "fsdp") else {"sync_every": 2}
    optimizer = kind(model, optimizer, group, **options)
    for _ in range(STEPS):
        optimizer.model(torch.randn(8, 600)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate()


def piped(world: Mesh, routing: str) -> None:
    """A few steps of two replicas in two stages, with the loss at the origin, clipped over the replica."""
    torch.manual_seed(0)
    world = isles.mesh(stage=2)
    shape = Shape(d_model=128, layers=2, heads=2, ffn=128, vocab=64, context=128, tie_embeddings=True)
    config = PipelineConfig(stages=2, microbatches=4, routing=routing)  # type: ignore[arg-type]
    pipeline = isles.Pipeline(Decoder(shape), world, batch_size=16, context=128, vocab=64, config=config)
    assert pipeline.cut.home
    inner = isles.Plain(pipeline.stage, torch.optim.SGD(pipeline.stage.parameters(), lr=0.01), peers=world.stage)
    optimizer = isles.NoLoCo(pipeline.stage, inner, world.outer, sync_every=2, max_norm=1.0)
    for _ in range(2):
        pipeline.step(torch.randint(0, 64, (16, 129)) if pipeline.reads else None)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate()
