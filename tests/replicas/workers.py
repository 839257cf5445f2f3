"""What the workers of these tests do; in a module of its own, so that fresh processes can import it.

The model is small and odd on purpose: vectors, matrices, 0.2 k entries, a number of them that no world size divides.
"""

from __future__ import annotations

import hashlib
import io
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isles
from isles.comm.mesh import Mesh
from isles.models.subnet import Axes, Axis

LINKS = isles.Links(bandwidth=1e8, latency=0.01)

HALVES = (("first", "bias"), ("second",))  # fragments of `Net`

# Every method, and every way of each to put its messages on the wire. H = 3 everywhere.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "ddp": ("ddp", {}),
    "ddp, small buckets": ("ddp", {"bucket_megabytes": 2e-4}),
    "ddp, bf16": ("ddp", {"codec": "bf16"}),
    "ddp, low rank": ("ddp", {"codec": "powersgd:1", "error_feedback": "local", "bucket_megabytes": 3e-4}),
    "ddp, int4": ("ddp", {"codec": "int4", "error_feedback": "global", "feedback_decay": 0.9}),
    # Thresholds that are always new: as many entries as planned.
    "dct-dp": ("dct-dp", {"sparsity": 0.9, "threshold_interval": 1, "exclude_below": 20, "bucket_megabytes": 3e-4}),
    "localsgd": ("localsgd", {"sync_every": 3}),
    "diloco": ("diloco", {"sync_every": 3, "outer_momentum": 0.5}),
    "diloco, int8": ("diloco", {"sync_every": 3, "outer_momentum": 0.5, "codec": "int8"}),
    "diloco, fp16": ("diloco", {"sync_every": 3, "outer_momentum": 0.5, "codec": "fp16"}),
    "diloco, topk": (
        "diloco",
        {"sync_every": 3, "outer_lr": 0.4, "codec": "topk:40", "error_feedback": "global", "feedback_decay": 0.95},
    ),
    "streaming-diloco": ("streaming-diloco", {"sync_every": 3, "fragments": HALVES}),
    "streaming, int4": (
        "streaming-diloco",
        {"sync_every": 3, "fragments": HALVES, "overlap_steps": 2, "codec": "int4", "error_feedback": "local"},
    ),
    "delayed": ("delayed", {"sync_every": 3}),
    "eager": ("eager", {"sync_every": 3, "outer_momentum": 0.5}),
    "eager, int8": ("eager", {"sync_every": 3, "outer_delay": 2, "fragments": HALVES, "codec": "int8"}),
    "noloco": ("noloco", {"sync_every": 3}),
    "noloco, no prefetch": ("noloco", {"sync_every": 3, "prefetch_phi": False}),
    "noloco, single vector": ("noloco", {"sync_every": 3, "exchange": "single_vector", "gamma": 0.4}),
    "noloco, theta only": ("noloco", {"sync_every": 3, "exchange": "theta_only"}),
    "noloco, lossy": ("noloco", {"sync_every": 3, "codec": "int8", "anchor_codec": "bf16"}),
    "streaming-noloco": ("streaming-noloco", {"sync_every": 3, "fragments": HALVES}),
    "fedavg": ("fedavg", {"sync_every": 3}),
    "slowmo": ("slowmo", {"sync_every": 3}),
    "fedadam": ("fedadam", {"sync_every": 3}),
    "fedyogi": ("fedyogi", {"sync_every": 3}),
    "postlocal-sgd": ("postlocal-sgd", {"sync_every": 3, "every_step_until": 4}),
    "sparta": ("sparta", {"sync_every": 3, "fraction": 0.3}),
    "sparseloco": ("sparseloco", {"sync_every": 3}),
    "dilocox": ("dilocox", {"sync_every": 3, "rank": 1, "start_compress": 1, "window": 0}),
    "demo": ("demo", {"check_every": 3}),
    "demo, bits": (
        "demo",
        {"compression_topk": 2, "compression_chunk": 4, "value_dtype": "sign", "transform": "random", "base": "muon"},
    ),
    "ist": ("ist", {"sync_every": 3}),
    "ist, central": (
        "ist",
        {"sync_every": 3, "server": "central", "sampler": "stratified", "optimizer_state": "reset"},
    ),
    "custom, low rank": (
        "custom",
        {"sync_every": 3, "outer_delay": 1, "landing": "carry", "codec": "powersgd:1+int4", "error_feedback": "local"},
    ),
    "noloco, seed 7": ("noloco", {"sync_every": 3, "seed": 7, "gamma": 0.3}),
}

DIVIDED = {name for name in RUNS if name.startswith("ist")}  # workers hold different parts, of different widths

REAL_ONLY: dict[str, tuple[str, dict[str, Any]]] = {"ddp, native": ("ddp", {"reduction": "native"})}


class Net(nn.Module):
    """A two-layer network on 5 inputs, which says what its units are."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(11, 5, generator=generator, dtype=torch.float64).to(dtype) / 2)
        self.bias = nn.Parameter(torch.randn(11, generator=generator, dtype=torch.float64).to(dtype) / 8)
        self.second = nn.Parameter(torch.randn(7, 11, generator=generator, dtype=torch.float64).to(dtype) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first.T + self.bias) @ self.second.T

    def split_axes(self) -> dict[str, Axes]:
        unit = Axis(layer="net.hidden", units=11)
        return {"first": (unit, None), "bias": (unit,), "second": (None, replace(unit, reads=True))}


class Whole(Net):
    """With a parameter that is not divided: IST compares what all hold."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.third = nn.Parameter(self.second.detach().sum(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.third


def batch(worker: int, step: int, rows: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs (rows, 5) and targets (rows, 7): a function of (worker, step) alone."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.sin(2 * x @ torch.ones(5, 7, dtype=torch.float64)).to(dtype)


def loss_of(model: nn.Module, worker: int, step: int, rows: int = 4) -> Tensor:
    """Mean squared error on `batch(worker, step)`."""
    x, y = batch(worker, step, rows, next(model.parameters()).dtype)
    return F.mse_loss(model(x), y)


def held_out(model: nn.Module) -> float:
    """Loss on 64 rows that nobody trains on."""
    with torch.no_grad():
        return float(loss_of(model, 99, 0, 64))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.01)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def usual_inner(name: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """AdamW, or SGD for a method that wants it, with the same weight decay."""
    if isles.method((RUNS | REAL_ONLY).get(name, (name, {}))[0]).usual_inner == "adamw":
        return adamw
    return lambda model: torch.optim.SGD(model.parameters(), lr=0.02, weight_decay=0.01)


def wrap(
    world: Mesh,
    name: str,
    model: nn.Module,
    inner: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    **options: Any,
) -> isles.ReplicaSync:
    """The method of `RUNS[name]`, or of that name, around a fresh inner optimizer."""
    method, defaults = (RUNS | REAL_ONLY).get(name, (name, {}))
    return isles.method(method)(model, (inner or usual_inner(name))(model), world.outer, **{**defaults, **options})


def train_step(optimizer: isles.ReplicaSync, worker: int, step: int, rows: int = 4) -> float:
    """One step; the loss before it."""
    loss = loss_of(optimizer.model, worker, step, rows)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def weights(model: nn.Module) -> Tensor:
    """All weights as one flat vector (n,)."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).clone()


def bits(tensor: Tensor) -> str:
    """A hash of every bit."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def counted(world: Mesh) -> dict[str, int]:
    """Bytes and messages on the replicas' channel so far."""
    traffic = world.world.traffic["outer"]
    return {
        "sent": traffic.bytes_sent,
        "received": traffic.bytes_received,
        "messages": traffic.messages_sent,
    }


def train(world: Mesh, name: str, steps: int) -> dict[str, Any]:
    """A whole run: losses, bytes, the weights at its end, after `finish`, and consolidated."""
    before = counted(world)
    model = Net(seed=world.rank)
    optimizer = wrap(world, name, model)
    losses = [train_step(optimizer, world.rank, step) for step in range(1, steps + 1)]
    ran = bits(weights(model))
    optimizer.finish()
    traffic = {key: value - before[key] for key, value in counted(world).items()}
    finished = bits(weights(model))
    with optimizer.evaluation_weights() as judged:
        judged_bits = bits(weights(judged))
    spread = optimizer.replica_std()
    optimizer.consolidate()
    return {
        "losses": losses,
        "bytes": traffic,
        "weights": [ran, finished, judged_bits, bits(weights(model))],
        "spread": spread,
        "planned": sum(planned.bytes_sent[world.rank] for planned in optimizer.schedule(steps)),
    }


def train_all(world: Mesh, names: list[str], steps: int) -> dict[str, Any]:
    """Several runs after each other in one world: starting processes costs more than training."""
    results = {}
    for name in names:
        results[name] = train(world, name, steps)
        world.world.barrier()
    return results


def save(optimizer: isles.ReplicaSync) -> bytes:
    """A worker's checkpoint as a file's bytes."""
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "model": optimizer.model.state_dict()}, file)
    return file.getvalue()


def load(optimizer: isles.ReplicaSync, file: bytes) -> None:
    """Continue from `save`. No pickle is needed to read it."""
    state = torch.load(io.BytesIO(file), weights_only=True)
    optimizer.model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def checkpointed(
    world: Mesh, name: str, steps: int, save_at: int | None = None, files: list[bytes] | None = None
) -> dict[str, Any]:
    """A run that takes a checkpoint after step `save_at` and goes on, or one that goes on from this worker's file."""
    model = Net(seed=world.rank if files is None else 99)  # a restored worker starts from other weights than these
    optimizer = wrap(world, name, model)
    log: list[Any] = []
    result: dict[str, Any] = {}
    if files is not None:
        load(optimizer, files[world.rank])
    while optimizer.steps < steps:
        loss = train_step(optimizer, world.rank, optimizer.steps + 1)
        if optimizer.steps == save_at:
            at = world.transport.now()
            result["file"] = save(optimizer)
            result["waited"] = world.transport.now() - at
        log.append((optimizer.steps, loss, world.transport.now(), counted(world), bits(weights(model))))
    optimizer.finish()
    log.append((world.transport.now(), counted(world), bits(weights(model))))
    return result | {"log": log}


def learned(log: list[Any]) -> list[Any]:
    """The log of `checkpointed` without what depends on the clock: bytes count when they leave, which for an exchange
    behind the computation is some time. In the end they have all left.
    """
    return [(step, loss, hashed) for step, loss, _, _, hashed in log[:-1]] + [log[-1][1:]]


def local_checkpoint(world: Mesh, names: list[str], steps: int, save_at: int) -> dict[str, Any]:
    """Real processes: go on after a checkpoint, then go on from it once more with new objects."""
    results = {}
    for name in names:
        before = counted(world)
        first = checkpointed(world, name, steps, save_at)
        world.world.barrier()
        # Traffic is restored too, so what is counted afterwards starts where it stood at the checkpoint.
        again = checkpointed(world, name, steps, files=[first["file"]] * world.size)
        world.world.barrier()
        results[name] = (before, learned(first["log"]), learned(again["log"]))
    return results


def killed(world: Mesh, steps: int, die_at: int, victim: int, on_peer_failure: str) -> dict[str, Any]:
    """NoLoCo where `victim` is killed in the middle of a round."""
    model = Net(seed=0)
    optimizer = wrap(world, "noloco", model, on_peer_failure=on_peer_failure)
    before = held_out(model)
    for step in range(1, steps + 1):
        if world.rank == victim and step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(optimizer, world.rank, step)
    optimizer.finish()
    return {"steps": optimizer.steps, "lost": sorted(optimizer.lost), "loss": (before, held_out(model))}  # type: ignore[attr-defined]
