"""What the worker processes of test_local.py run."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from isles.comm.mesh import Mesh
from tests.replicas.workers import Net, train_step, wrap


def reports(world: Mesh) -> str:
    """Tell the launcher three things on the way."""
    for number in range(3):
        world.report((world.rank, number))
    return f"result of {world.rank}"


class Odd(ValueError):
    """A ValueError that cannot be rebuilt from what it hands to its base class."""

    def __init__(self, key: str, value: int) -> None:
        super().__init__(f"{key} is {value}")


def many(world: Mesh, given: list[torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """As many tensors out as in; those of worker 1 two looks each at one memory, and parts of a graph."""
    total = float(torch.stack(given).sum())
    if world.rank == 0:
        return total, {str(number): tensor + 1 for number, tensor in enumerate(given)}
    whole = torch.arange(10.0, requires_grad=True) * 2
    return total, {"whole": whole, "part": whole[2:4], "one": torch.nn.Parameter(torch.ones(1)), "none": torch.ones(0)}


def overwrites(world: Mesh, given: torch.Tensor) -> torch.Tensor:
    """Tell of a loss and of many tensors; then write to the one, and to what was given to all workers."""
    loss = torch.arange(3.0)
    world.report({"loss": loss, "all": [torch.full((1,), float(number)) for number in range(300)]})
    loss.fill_(-1.0)
    given += world.rank + 1
    world.world.barrier()
    return given


def learns(world: Mesh) -> list[tuple[torch.nn.Module, dict[str, Any]]]:
    """Three steps of a method that looks on at the backward pass, and of one that does not."""
    made = []
    for name in ("ddp", "diloco"):
        optimizer = wrap(world, name, Net(seed=world.rank))
        for step in range(1, 4):
            train_step(optimizer, world.rank, step)
        made.append((optimizer.consolidate(), optimizer.state_dict()))
    return made


def gone(world: Mesh) -> None:
    """Tell of a tensor and be gone."""
    world.report(torch.full((3,), float(world.rank)))
    os._exit(5)


def raises_tensor(world: Mesh) -> None:
    if world.rank == 1:
        raise ValueError("the loss is", torch.tensor([1.0, 2.0]))
    world.world.barrier()


class OneWay:
    """Can be taken apart, but not put together again."""

    def __reduce__(self) -> tuple:
        return refuse, ()


def refuse() -> None:
    raise RuntimeError("not twice")


def identity(world: Mesh, *arguments: object) -> tuple:
    return (world.rank, world.size, torch.get_num_threads(), arguments)


def tensors(world: Mesh) -> dict[str, torch.Tensor]:
    return {"rank": torch.full((3,), world.rank), "large": torch.full((300_000,), float(world.rank))}


def misbehaves(world: Mesh, how: str) -> object:
    """Worker 1 does something bad; the others wait for it."""
    if world.rank == 1:
        if how == "value":
            raise ValueError("batch_size = 0: choose 1 or more")
        if how == "odd":
            raise Odd("steps", -1)
        if how == "local":

            class Inner(ValueError):
                pass

            raise Inner("nobody can import me")
        if how == "key":
            raise KeyError("missing")
        if how == "exit":
            os._exit(3)
        if how == "sys.exit":
            sys.exit(4)
        if how == "abort":
            os.abort()
        if how == "lambda":
            return lambda: 0
        if how == "one way":
            return OneWay()
    world.world.exchange(1 - world.rank if world.rank < 2 else 1, torch.zeros(1))
    return world.rank


def returns(world: Mesh, how: str) -> object:
    """All come to their end; worker 1 with a result that cannot travel."""
    world.world.barrier()
    if world.rank != 1:
        return world.rank
    return OneWay() if how == "one way" else lambda: 0


def lingers(world: Mesh, folder: str, seconds: float = 60.0) -> None:
    """Leave the process's id in `folder`; then half of the workers compute and the others wait for one of them."""
    Path(folder, f"{world.rank}.part").write_text(str(os.getpid()))
    Path(folder, f"{world.rank}.part").rename(Path(folder, f"{world.rank}.pid"))
    world.report("here")
    ends_at = time.monotonic() + seconds
    if world.rank % 2:
        world.world.exchange(world.rank - 1, torch.zeros(1))
    while time.monotonic() < ends_at:
        sum(range(1000))


def heard_at(pid: int) -> list[str]:
    """Addresses at which a process listens, TCP."""
    import psutil

    return [str(one.laddr.ip) for one in psutil.Process(pid).net_connections("tcp") if one.status == psutil.CONN_LISTEN]


def listeners(world: Mesh) -> list[str]:
    """Of this worker, which is connected to the others."""
    return heard_at(os.getpid())
