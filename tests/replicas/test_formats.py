"""Memory formats that change after the optimizer was made: strides are a matter of the moment, bits are not."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import isles
from isles.comm.mesh import Mesh
from isles.network.exchange_plan import BLOCK
from isles.replicas.flat import FlatParameters
from isles.replicas.watch import WeightCopies
from tests.covers import cover
from tests.gloo import run_gloo
from tests.replicas.workers import RUNS, bits, usual_inner, weights, wrap

# ist has no axes of this model; the matrix products of "muon" round by the memory format.
RIGHT = [name for name in RUNS if not name.startswith("ist") and name != "demo, bits"]
CORE = ["ddp", "localsgd", "diloco", "demo"]
OTHERS = [name for name in RIGHT if name not in CORE]
WHEN = ["gradients", "between", "alone", "data", "before", "after"]


class Wide(nn.Module):
    """A weight of more than one block of the flat vector, whose gradient is the same in any memory format."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(257, 60, 3, 3, generator=generator))
        self.second = nn.Parameter(torch.randn(7, 11, generator=generator))
        assert self.first.numel() > BLOCK


def bits_of(world: Mesh, name: str, when: str) -> str:
    """Of all weights after seven steps. when: the format changes, before, after wrapping, or on worker 0 alone."""
    model = Wide()
    if when == "before":
        model.to(memory_format=torch.channels_last)
    options = {"fragments": (("first",), ("second",))} if "fragments" in RUNS.get(name, ("", {}))[1] else {}
    optimizer = wrap(world, name, model, lambda model: usual_inner(name)(model), **options)
    for step in range(1, 8):
        if (when, step) in (("after", 1), ("between", 5)) or (when == "alone" and step == 5 and world.rank == 0):
            model.to(memory_format=torch.channels_last)
        generator = torch.Generator().manual_seed(100 * world.rank + step)
        given = [torch.randn(parameter.shape, generator=generator) for parameter in model.parameters()]
        torch.autograd.backward(list(model.parameters()), given)
        if when == "gradients":
            model.first.grad = model.first.grad.to(memory_format=torch.channels_last)  # type: ignore[union-attr]
        if when == "data" and step == 5:
            model.first.data = model.first.data.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)
        optimizer.step()
        optimizer.zero_grad()
    assert (model.first.is_contiguous()) == (when in ("never", "gradients") or (when == "alone" and world.rank == 1))
    return bits(weights(optimizer.consolidate()))


@cache
def plain(name: str) -> list[str]:
    return isles.run_virtual(bits_of, 2, args=(name, "never"))


@pytest.mark.parametrize(("name", "when"), [*cover(CORE, WHEN, each=1), *cover(OTHERS, WHEN, each=1, of=12, turn=4)])
def test_the_memory_format_may_change(name: str, when: str) -> None:
    """Between rounds or before the first one, on all workers or on one: the bits of a run that never changed it."""
    assert isles.run_virtual(bits_of, 2, args=(name, when)) == plain(name)


def test_the_memory_format_may_change_over_gloo() -> None:
    assert run_gloo(bits_of, args=("diloco", "alone")) == run_gloo(bits_of, args=("diloco", "never"))


def test_inside_an_island_a_format_that_changes_is_reported() -> None:
    """Its workers hold views of each other's rows."""

    def worker(world: Mesh) -> None:
        model = Wide()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = isles.DiLoCo(model, isles.DDP(model, inner, world.inner), world.outer, sync_every=1)
        model.to(memory_format=torch.channels_last)
        sum(own.sum() for own in model.parameters()).backward()  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="the model was moved after its optimizer was made: move it before"):
            optimizer.step()

    isles.run_virtual(worker, 4, inner=2)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 1, 2), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_a_flat_vector_is_the_same_in_any_order_of_memory(order: tuple[int, ...]) -> None:
    """Reading, writing and hashes do not know of strides; runs of a block begin and end anywhere in a row."""
    logical: Any = torch.randn(5, 7, 61, 67)
    inverse = sorted(range(4), key=lambda axis: order[axis])
    strided = logical.permute(order).contiguous().permute(inverse)
    assert torch.equal(strided, logical)
    small = torch.randn(3)
    plain, other = FlatParameters([small, logical]), FlatParameters([small, strided])
    assert torch.equal(other.read(other.new()), plain.read(plain.new()))
    assert other.digest(other.read(other.new())) == plain.digest(plain.read(plain.new()))
    other.write(torch.arange(other.numel, dtype=torch.float32))
    assert torch.equal(strided.reshape(-1), torch.arange(3, other.numel, dtype=torch.float32))


class Made(TorchDispatchMode):
    """The entries of the largest memory that was made within, beside that of `known`."""

    def __init__(self, known: nn.ParameterList) -> None:
        super().__init__()
        self.known, self.most = {one.untyped_storage().data_ptr() for one in known}, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in self.known:
            self.most = max(self.most, made.untyped_storage().nbytes() // made.itemsize)
        return made


class OwnSGD(torch.optim.SGD):
    """Somebody's own, at whose landings is looked."""


def test_a_look_at_a_landing_copies_few_entries() -> None:
    """512 of each weight, whatever its memory format, and the same ones."""
    model = nn.ParameterList([torch.randn(64, 32, 3, 3), torch.randn(2, 90_000), torch.randn(()), torch.randn(0, 4)])
    expected = [parameter.detach().reshape(-1)[:512].double() for parameter in model]
    model[0].data = model[0].data.to(memory_format=torch.channels_last)
    model[1].data = model[1].data.T.contiguous().T
    copies = WeightCopies(OwnSGD(model, lr=0.1), list(model))
    with Made(model) as made:
        copies.before_landing()
    assert made.most == 512
    assert copies._start is not None and all(map(torch.equal, copies._start, expected))
