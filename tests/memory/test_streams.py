"""The engine of a GPU without one: its copies and kernels never meet, in whatever order streams get to them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from isles.base.wrapping import host_work
from isles.memory.costs import ACTIVATIONS, Placement
from isles.memory.engines import cuda
from isles.memory.engines.base import Inline, ThreadEngine
from isles.memory.engines.cuda import CudaMoves
from isles.memory.optimizer import Managed
from isles.network.machines import MACHINES
from isles.training.memory import in_use
from isles.training.memory.in_use import try_out
from tests.memory.loops import DECODER, UNITS, adamw, plan_of, profiled
from tests.memory.streams import Event, Stream, Watch, WatchedCuda, watching

CHUNK = 4096  # bytes of the ring's pieces: several for each of the small matrices
EVERY = [Placement(tier, one) for tier in ("device", "optimizer", "host") for one in ACTIVATIONS]


def _mixed(seed: int) -> tuple[Placement, ...]:
    rng = random.Random(seed)
    return tuple(rng.choices(EVERY, k=UNITS))


def _trained(
    plan: tuple[Placement, ...], autocast: str, accumulation: int, watch: Watch | None, steps: int = 3
) -> list[torch.Tensor]:
    """A few steps; the weights that they leave."""
    torch.manual_seed(0)
    made = profiled(DECODER, autocast)  # kept for all tests of this process: not of the host's work, and not watched
    with host_work():
        model = DECODER.make()
    inner = adamw(model)
    engine = ThreadEngine() if watch is None else WatchedCuda(watch)
    chosen, cpu = plan_of(made, plan, accumulation=accumulation), torch.device("cpu")
    with Managed(chosen, model, inner, profile=made, machine=MACHINES["H100"], device=cpu, engine=engine) as managed:
        if watch is not None:
            watch.on_device(*(one for device_copy in managed.runner.device_copy.values() for one in device_copy.device))
        for step, index in itertools.product(range(steps), range(accumulation)):
            with host_work():
                batch = DECODER.batch(step * accumulation + index)
            if watch is not None:
                watch.on_device(batch)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast == "bf16"):
                loss = model(batch).loss / accumulation
            loss.backward()
            del loss
            if index == accumulation - 1:
                managed.step()
                managed.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_CHUNK", CHUNK)


_PLANS = {one.short: (one,) * UNITS for one in EVERY} | {f"mixed-{seed}": _mixed(seed) for seed in range(1, 12)}


def _cases() -> list[Any]:
    """Every plan, with and without a format that changes on the way, of one and of two batches; one in `make test`."""
    every = itertools.product(_PLANS, (1, 2), ("none", "bf16"))
    short = ("mixed-1", 2, "bf16")
    return [pytest.param(*case, marks=() if case == short else pytest.mark.long) for case in every]


@pytest.mark.parametrize(("name", "accumulation", "autocast"), _cases())
def test_no_copy_meets_a_kernel(name: str, accumulation: int, autocast: str) -> None:
    plan = _PLANS[name]
    plain = _trained(plan, autocast, accumulation, None)
    with watching() as watch:
        own = _trained(plan, autocast, accumulation, watch)
    assert watch.races == []
    assert watch.kernels > 100
    assert (watch.copies > 0) == any(one.tier != "device" or one.activations == "swap" for one in plan)
    assert all(map(torch.equal, own, plain))


def _nothing(*_: Any) -> None:
    """A wait that is forgotten."""


def _without(owner: type, method: str, race: str, name: str, marks: Any = pytest.mark.long) -> Any:
    """One wait that is left out, as a parameter."""
    return pytest.param(lambda patch: patch.setattr(owner, method, _nothing), race, id=name, marks=marks)


@pytest.mark.parametrize(
    ("mutant", "race"),
    [
        _without(Stream, "wait_event", "may be at", "a lane does not wait for the kernels", marks=()),
        _without(Stream, "wait_stream", "writes what kernels may be at", "memory is written too soon"),
        _without(CudaMoves, "_wait", "may be at", "a copy counts as over when it is called", marks=()),
        _without(Event, "synchronize", "may be at", "a piece of the ring is taken too soon"),
        pytest.param(
            lambda patch: patch.setattr(CudaMoves, "room", lambda moves: nullcontext()),
            "memory of memory up is given back while kernels may be at it",
            id="a lane makes memory of its own",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_wait_that_is_left_out_is_a_race(mutant: Callable[..., None], race: str, monkeypatch: Any) -> None:
    profiled(DECODER, "bf16")
    mutant(monkeypatch)
    with watching() as watch:
        _trained(tuple(EVERY[-4:]), "bf16", 1, watch, steps=2)
    assert any(race in one for one in watch.races)


def test_a_gpu_is_tried_out_before_it_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two engines leave the same bits; one that loses an update in a lane does not."""
    cpu, before = torch.device("cpu"), torch.get_rng_state()
    made: list[Any] = []
    real = in_use.profile
    monkeypatch.setattr(in_use, "_SHAPE", replace(in_use._SHAPE, d_model=32, heads=2, ffn=64, context=16))
    monkeypatch.setattr(in_use, "profile", lambda *a, **k: made[0] if made else made.append(real(*a, **k)) or made[0])
    try_out(cpu, ThreadEngine, Inline)
    assert torch.equal(torch.get_rng_state(), before)

    class Forgetful(Inline):
        def submit(self, lane: Any, urgency: Any, seconds: float, work: Any, done: Any) -> None:
            super().submit(lane, urgency, seconds, _nothing if lane == "host" and urgency[-1] == 2 else work, done)

    with pytest.raises(RuntimeError, match="on cpu, copies beside kernels leave other bits than copies alone"):
        try_out(cpu, Forgetful, Inline)
