"""A worker that torchrun's variables describe, with process groups of its own before `isles.init()` and beside it."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

import isles
from isles.comm.errors import RendezvousFailed
from isles.comm.mesh import Mesh
from isles.comm.transport import native_collectives


def sums() -> int:
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


def swaps(world: Mesh) -> bool:
    return int(world.outer.exchange(1 - world.rank, torch.tensor([world.rank]))) == 1 - world.rank


def init() -> Mesh:
    return isles.init(deadlines=isles.Deadlines(join=2.0))


def work(rank: int, port: int, store: str) -> None:
    """Of two. store: a file that does not exist yet."""
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= variables
    dist.init_process_group("gloo")
    assert sums() == 2
    dist.destroy_process_group()
    world = init()  # whose keys are not those of the group that was
    assert world.size == 2 and DistributedSampler(range(4)).rank == rank, "torch's tools find a default group"
    try:
        dist.init_process_group("gloo")
        raise AssertionError("torch has two default groups")
    except ValueError as error:
        assert "default process group twice" in str(error)
    if world.rank == 1:
        time.sleep(3.0)  # longer than `join`: that was for meeting alone
    assert swaps(world)
    native = native_collectives(world.transport)
    assert dist.get_world_size(native.process_group((0, 1), "cpu")) == 2
    began = time.monotonic()
    if world.rank == 0:
        try:
            native.process_group((1, 0), "cpu")  # to which the other does not come
        except RendezvousFailed as error:
            assert "worker 1 of 2 did not come" in str(error) and time.monotonic() - began < 20
            print("told", flush=True)
    assert swaps(world)
    world.close()
    again = init()
    assert again.transport is not world.transport and swaps(again)
    again.close()
    for name in variables:
        del os.environ[name]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    beside = init()  # no variables: the world of the user's group
    assert beside.size == 2 and swaps(beside) and sums() == 2
    beside.close()
    assert sums() == 2
