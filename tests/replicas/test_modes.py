"""Torch's modes around a user's calls (autocast, default dtype, default device, inference mode) change no bit, and the
user's own code within those calls (a closure, the body of `no_sync`) stays in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import isles
from isles.comm.codecs.kinds import FORMS
from isles.comm.mesh import Mesh
from tests.covers import cover
from tests.gloo import run_gloo
from tests.replicas.workers import RUNS, Net, batch, bits, weights, wrap


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)  # not what it was before: another virtual worker may have been within


@contextmanager
def deterministic() -> Iterator[None]:
    """Which fills what `torch.empty` makes with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "bfloat16": partial(default_dtype, torch.bfloat16),
    "float64": partial(default_dtype, torch.float64),
    "meta": partial(torch.device, "meta"),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "deterministic": deterministic,
}
ODD = [name for name in MODES if name != "plain"]
FORM = {f"custom, {form}": ("custom", {"sync_every": 2, "codec": form, "error_feedback": "local"}) for form in FORMS}
FORM["ddp, dct"] = ("ddp", {"codec": "dct_topk:64", "error_feedback": "local"})


class Same(Net):
    """`Net` whose own arithmetic is the same in all modes: without matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float32, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().sum()
        hidden = torch.tanh((x[:, None] * self.first).sum(-1) + self.bias)
        return (hidden[:, None] * self.second).sum(-1)


def inside(mode: str) -> bool:
    """Whether this thread is in that mode."""
    return {
        "autocast": torch.is_autocast_enabled("cpu"),
        "meta": torch.get_default_device().type == "meta",
        "inference": torch.is_inference_mode_enabled(),
        "no_grad": not torch.is_grad_enabled(),
    }.get(mode, True)


def outside(call: Callable[..., Any], *args: Any) -> Any:
    """What a method does within is in no mode of the user's, whichever call it was."""
    assert not any(map(inside, ("autocast", "meta", "inference"))) and inside("no_grad")
    return call(*args)


def trained(world: Mesh, name: str, mode: str) -> tuple[str, float]:
    """Eight steps, every public call in a context of its own; a new optimizer goes on half way."""
    method, options = FORM.get(name, (name, {}))
    within = MODES[mode]
    passes = nullcontext if mode in ("inference", "no_grad") else within  # in these torch computes no gradients

    def backward(x: Tensor, y: Tensor) -> Tensor:
        with passes():
            loss = F.mse_loss(model(x), y)
            loss.backward()
        return loss.detach()

    def closure(x: Tensor, y: Tensor) -> Tensor:
        assert mode in ("inference", "no_grad") or inside(mode), "the closure is the user's"
        optimizer.zero_grad()
        return backward(x, y)

    model = Same()
    with within():
        optimizer = wrap(world, method, model, **options)
    for step in range(1, 9):
        x, y = batch(world.rank, step)
        if step in (2, 6):
            with within(), optimizer.no_sync():
                assert inside(mode), "the body is the user's"
                with torch.inference_mode(False), torch.enable_grad():
                    backward(x, y)
        if step == 3 and mode not in ("inference", "no_grad"):
            with within():
                optimizer.step(partial(closure, x, y))
        else:
            backward(x, y)
            with within():
                optimizer.step()
        optimizer.zero_grad()
        if step == 4:
            with within():
                state = optimizer.state_dict()
                saved = {key: value.clone() for key, value in optimizer.weights().items()}
            model = Same()
            with within():
                optimizer = wrap(world, method, model, **options)
                optimizer.load_weights(saved)
                optimizer.load_state_dict(state)
        if step == 7:
            with within(), optimizer.evaluation_weights() as judged:
                assert inside(mode), "the body is the user's"
                judged(x)
    with within():
        optimizer.settle()
        optimizer.together = partial(outside, optimizer.together)  # type: ignore[method-assign]
        spread = optimizer.replica_std() if not name.startswith("ist") else 0.0
        model = optimizer.consolidate()
    assert not any(parameter.is_inference() for parameter in model.parameters())
    return bits(weights(model)), spread


def run(name: str, mode: str) -> list[tuple[str, float]]:
    return in_mode(mode, trained, name)


def in_mode(mode: str, worker: Callable[..., Any], *args: Any) -> list[Any]:
    """These are of all threads: set around all workers, not by each."""
    if mode in ("bfloat16", "float64", "deterministic"):
        with MODES[mode]():
            return isles.run_virtual(worker, 2, args=(*args, "plain"))
    return isles.run_virtual(worker, 2, args=(*args, mode))


plain = cache(partial(run, mode="plain"))


@pytest.mark.parametrize(("name", "mode"), [*cover([*RUNS, *FORM], ODD, each=1, of=10), ("ddp, dct", "autocast")])
def test_no_mode_changes_a_bit(name: str, mode: str) -> None:

    assert run(name, mode) == plain(name)


def sums(world: Mesh, mode: str) -> list[float]:
    """A user's own collective, whose codec multiplies matrices."""
    from isles.comm.codecs import codec

    mine = torch.linspace(world.rank, 2, 5000, dtype=torch.float32, device="cpu")
    with MODES[mode]():
        world.outer.mean(mine, codec("dct_topk:64"))
        world.world.barrier()
    return mine.tolist()


@pytest.mark.parametrize("mode", ODD)
def test_a_users_own_collectives(mode: str) -> None:
    assert in_mode(mode, sums) == in_mode("plain", sums)


def in_processes(world: Mesh) -> list[tuple[str, float]]:
    return [trained(world, name, mode) for name, mode in (("dilocox", "autocast"), ("ddp, int4", "meta"))]


def test_modes_over_gloo() -> None:
    """Whose threads do part of the work."""
    each = [run("dilocox", "plain"), run("ddp, int4", "plain")]
    assert run_gloo(in_processes) == [list(worker) for worker in zip(*each, strict=True)]


def hooked(world: Mesh) -> list[bool]:
    """Whether autograd's hooks do their part of the exchange under the autocast that `backward` is called in."""
    seen: list[bool] = []

    class Watched(isles.DDP):
        def reduction(self, bucket: Any) -> Any:
            own = super().reduction(bucket)
            begin = own.begin
            own.begin = lambda *args: (seen.append(torch.is_autocast_enabled("cpu")), begin(*args))[1]
            return own

    model = Same()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Watched(model, inner, world.outer, bucket_megabytes=1e-5)  # most leave amid the pass
    with MODES["autocast"]():
        model(batch(world.rank, 1)[0]).sum().backward()
    assert len(seen) == 3
    optimizer.step()
    return seen


def test_hooks_leave_the_modes_of_the_backward_pass() -> None:
    assert not any(any(seen) for seen in isles.run_virtual(hooked, 2))


class Naive(torch.optim.SGD):
    """Writes to the weights as a first try at an optimizer does; torch refuses that where gradients are recorded."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad


def naive(world: Mesh) -> bool:
    model = Same()
    optimizer = isles.LocalSGD(model, Naive(model.parameters(), lr=0.1), world.outer, sync_every=2)
    for step in range(1, 4):
        F.mse_loss(model(batch(world.rank, step)[0]), batch(world.rank, step)[1]).backward()
        optimizer.step()
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
    return optimizer.replica_std() > 0


def test_a_step_records_no_gradients() -> None:
    assert isles.run_virtual(naive, 2) == [True, True]
