"""What a run holds is what its dry run said: the tensors that can be reached from a worker's optimizer, counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isles
from isles.comm.group import Group
from isles.comm.mesh import Mesh
from isles.models import Decoder, Shape
from isles.network.planner.memory import UNDER_WAY, WorkerMemory
from isles.replicas import method
from tests.replicas.workers import LINKS

SHAPE = Shape(d_model=64, layers=3, heads=4, ffn=160, vocab=300, context=16, tie_embeddings=True)
METHODS = {
    "ddp": {},
    "localsgd": {"sync_every": 2},
    "diloco": {"sync_every": 2},
    "noloco": {"sync_every": 2},
    "eager": {"sync_every": 2},
    "dilocox": {"sync_every": 2, "codec": "int4", "rank": 0},
    "sparseloco": {"sync_every": 2},
    "slowmo": {"sync_every": 2},
}


def reached(root: Any) -> Iterator[Tensor]:
    """Tensors that hang on an object; not those of the world that it is in, nor what is on its way."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, Group | Mesh | type | str | int | float | torch.Generator):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield one
            stack.append(one.grad if one.is_leaf else None)
        elif isinstance(one, nn.Module):
            stack += [*one.parameters(), *one.buffers()]
        elif isinstance(one, dict):
            stack += one.values()
        elif isinstance(one, list | tuple | set):
            stack += one
        elif type(one).__module__.startswith(("isles.replicas", "isles.comm.collectives", "torch.optim")):
            stack += [getattr(one, name) for name in getattr(type(one), "__slots__", ()) if hasattr(one, name)]
            stack += getattr(one, "__dict__", {}).values()


def worker(world: Mesh, name: str) -> tuple[int, WorkerMemory]:
    """Bytes of all it holds after a few rounds, and what its method says."""
    model = Decoder(SHAPE, seed=1)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer: Any = method(name)(model, inner, world.outer, **METHODS[name])
    draw = torch.Generator().manual_seed(world.rank)
    for _ in range(7):
        optimizer.zero_grad(set_to_none=False)
        model(torch.randint(300, (2, 17), generator=draw)).loss.backward()
        optimizer.step()
    optimizer.settle()
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in reached(optimizer)}
    weights = sum(parameter.nbytes for parameter in model.parameters())
    said = WorkerMemory(
        weights=weights,
        gradients=weights,
        inner=sum(one.nbytes for state in inner.state.values() for one in state.values()),
        held=tuple(held for held in optimizer.memory() if held.what != UNDER_WAY),
        tables=sum(buffer.nbytes for buffer in model.buffers()),
    )
    return sum(storages.values()), said


@pytest.mark.parametrize("name", METHODS)
def test_a_run_holds_what_was_said(name: str) -> None:
    """Between rounds, to 1 %: hashes and other odds and ends are not told."""
    for found, said in isles.run_virtual(worker, 2, links=LINKS, args=(name,)):
        assert found == pytest.approx(said.training, rel=0.01), {one.what: one.nbytes for one in said.held}
