"""What workers do on the fake GPU, and on the CPU to compare it with: a few steps of one method, all of it counted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import isles
from isles.comm.mesh import Mesh
from isles.models import Decoder, Shape
from tests.device import fake_cuda
from tests.replicas.workers import load, save

STEPS, SAVED_AFTER = 8, 5
COUNTED = range(3, STEPS + 1)
"""The first steps make what later ones have: states of the inner optimizer, hooks, warnings."""
# Tensors of more than a block of flat vectors, and of less.
SHAPE = Shape(d_model=128, layers=2, heads=2, ffn=384, vocab=1100, context=16, tie_embeddings=False)
_LINKS = isles.Links(bandwidth=1e9, latency=0.001)

_EVERY_3 = {"sync_every": 3}  # steps 3 and 6
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {} if name in ("none", "ddp", "fsdp") else _EVERY_3 for name in isles.METHODS},
    "dct-dp": {"sparsity": 0.9, "exclude_below": 200},
    "demo": {"check_every": 3},
    "streaming-diloco": {**_EVERY_3, "overlap_steps": 1},
    "postlocal-sgd": {**_EVERY_3, "every_step_until": 1},
    "sparta": {**_EVERY_3, "fraction": 0.1},
    "dilocox": {**_EVERY_3, "rank": 4, "start_compress": 1, "window": 0},
}


def made(
    world: Mesh,
    name: str,
    device: torch.device,
    settings: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> isles.ReplicaSync:
    """The method around a decoder on `device`."""
    model: nn.Module = Decoder(SHAPE, seed=0, device=device, dtype=dtype)
    kind = isles.method(name)
    if name == "fsdp":
        model = isles.shard(model, world.outer)
    if kind.usual_inner == "sgd":
        inner: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    else:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return kind(model, inner, world.outer, max_norm=1.0, **(SETTINGS[name] if settings is None else settings))


def batch(rank: int, step: int, device: torch.device) -> Tensor:
    """Of this worker and step, the same on all devices."""
    drawn = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randint(0, SHAPE.vocab, (2, SHAPE.context + 1), generator=drawn).to(device)


def train(
    world: Mesh, name: str, on: str, saved: list[bytes] | None = None, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Losses, weights' bits and counts of a whole run. on: "cpu", or "cuda": worker r has cuda:r+1 while cuda:0 is the
    current one, which nobody should touch. saved: checkpoints by rank to go on from. options: of `made`.
    """
    device = torch.device(on) if on == "cpu" else torch.device(on, world.rank + 1)
    optimizer = made(world, name, device, **(options or {}))
    found: dict[str, Any] = {"losses": {}, "counts": {}, "file": b""}
    sent = world.world.traffic["outer"].bytes_sent
    if saved is not None:
        load(optimizer, saved[world.rank])
    while optimizer.steps < STEPS:
        step = optimizer.steps + 1
        loss = optimizer.model(batch(world.rank, step, device)).loss
        before = fake_cuda.counts(world.rank + 1)
        loss.backward()
        optimizer.step()
        if step in COUNTED:
            found["counts"][step] = fake_cuda.since(before, world.rank + 1)
        optimizer.zero_grad()
        found["losses"][step] = float(loss)
        if step == SAVED_AFTER and saved is None:
            found["file"] = save(optimizer)
    found["strays"] = [str(tensor.device) for tensor in _tensors(optimizer) if tensor.device != device]
    with optimizer.evaluation_weights() as model, torch.no_grad():
        found["judged"] = float(model(batch(99, 0, device)).loss)
    optimizer.replica_std()
    whole = optimizer.consolidate()
    with torch.no_grad():
        found["consolidated"] = float(whole(batch(99, 0, device)).loss)
    found["weights"] = torch.cat([parameter.detach().reshape(-1).cpu() for parameter in whole.parameters()])
    found["strays"] += [str(one.device) for one in whole.parameters() if one.device != device]
    found["bytes"] = world.world.traffic["outer"].bytes_sent - sent
    return found


def _tensors(optimizer: isles.ReplicaSync) -> list[Tensor]:
    """What must be where the worker computes: weights, and moments of the inner optimizer."""
    moments = [
        one for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor) and one.dim()
    ]
    return [*optimizer.model.parameters(), *optimizer.model.buffers(), *moments]


def run(
    name: str, on: str, saved: list[bytes] | None = None, options: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """`train` of two virtual workers."""
    return isles.run_virtual(train, 2, links=_LINKS, args=(name, on, saved, options))
