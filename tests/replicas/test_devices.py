"""Weights on a GPU, anchors on the host, and autograd's own thread; without a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import isles
from isles.comm.group import Group
from isles.comm.mesh import Mesh
from isles.replicas.island.fsdp import Sharding, _shard
from isles.replicas.parts.choices import Blend, Carry, Replace

DEADLINE = 5.0


class OneDevice(TorchDispatchMode):
    """Refuses what mixes devices, as GPUs do; copies may."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        devices = {leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        if len(devices) > 1 and "copy" not in str(func):
            raise RuntimeError(f"{func} mixes {devices}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("landing", [Replace(), Blend(0.5), Carry()], ids=lambda landing: landing.name)
def test_a_landing_crosses_from_the_host_to_the_weights_device(landing: Any) -> None:
    with FakeTensorMode(), OneDevice():
        live = [torch.empty(3, device="cuda", dtype=torch.bfloat16)]
        anchor, reference = [torch.empty(3)], [torch.empty(3)]
        with pytest.raises(RuntimeError, match="mixes"):
            torch._foreach_add(anchor, live)
        landing.land(live, anchor, reference)
        assert (live[0].device.type, live[0].dtype) == ("cuda", torch.bfloat16)
        assert {anchor[0].device.type, reference[0].device.type} == {"cpu"}


def test_shard_makes_the_gpu_of_the_model_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's fully_shard moves parameters to that one. No GPU is here: all that follows is left out."""

    class Taken(Exception):
        pass

    def take(device: torch.device) -> None:
        raise Taken(device)

    monkeypatch.setattr("torch.cuda.set_device", take)
    with FakeTensorMode():
        model = torch.nn.ParameterList([torch.empty(2, device="cuda:1")])
    sharding = Sharding(cast(Group, None), model, (), True)
    with pytest.raises(Taken, match="cuda:1"):
        _shard(model, [], sharding)


def _steps(world: Mesh, name: str, device_thread: ThreadPoolExecutor | None) -> tuple[list[torch.Tensor], float]:
    """Three steps on a batch of the worker's own. device_thread: where backward passes run, as torch has one thread for
    all that is on a GPU; None: in the worker's thread, as on the CPU.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    kind = isles.method(name)
    optimizer = kind(
        model, torch.optim.SGD(model.parameters(), lr=0.1), world.outer, kind.Config(bucket_megabytes=1e-5)
    )
    inputs = torch.arange(8.0).view(2, 4).add(world.rank)
    for _ in range(3):
        loss = model(inputs).square().mean()
        if device_thread is None:
            loss.backward()
        else:
            device_thread.submit(loss.backward).result(DEADLINE)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()], world.transport.now()


@pytest.mark.parametrize("name", ["ddp", "dct-dp"])
def test_virtual_workers_may_share_the_thread_of_their_backward_passes(name: str) -> None:
    """The same bits at the same virtual time as where each worker has its own; more buckets than one leave."""
    own = isles.run_virtual(_steps, 3, args=(name, None))
    with ThreadPoolExecutor(1) as device_thread:
        shared = isles.run_virtual(_steps, 3, args=(name, device_thread))
    for (weights, clock), (same, then) in zip(own, shared, strict=True):
        assert clock == then > 0
        assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
