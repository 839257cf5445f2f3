"""A plan on a GPU; all of this is skipped without one, and `test_streams.py` stands in for it."""

from __future__ import annotations

import random

import pytest
import torch

from isles.memory.costs import ACTIVATIONS, Placement, least_peak
from isles.memory.engines.base import Engine, Inline, ThreadEngine
from isles.memory.engines.cuda import Cuda, CudaMoves, usual_engine
from isles.memory.optimizer import Managed
from isles.network.machines import MACHINES
from tests.memory.loops import DECODER, UNITS, adamw, plan_of, profiled

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
GPU = torch.device("cuda", 0)
Left = tuple[list[float], list[torch.Tensor], list[torch.Tensor]]


def _plans() -> list[tuple[Placement, ...]]:
    rng = random.Random(1)
    every = [Placement(tier, one) for tier in ("device", "optimizer", "host") for one in ACTIVATIONS]
    return [(one,) * UNITS for one in every] + [tuple(rng.choices(every, k=UNITS)) for _ in range(6)]


def _trained(plan: tuple[Placement, ...] | None, engine: Engine | None, *, autocast: str = "none") -> Left:
    """Six steps on the GPU, with clipping; None: without a plan."""
    torch.manual_seed(0)
    model = DECODER.make()
    made = profiled(DECODER, autocast)
    if plan is None:
        model.to(GPU)
    inner = adamw(model)
    managed = None
    if plan is not None:
        chosen = plan_of(made, plan)
        managed = Managed(chosen, model, inner, profile=made, machine=MACHINES["H100"], device=GPU, engine=engine)
    optimizer, losses = managed or inner, []
    for step in range(6):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast == "bf16"):
            loss = model(DECODER.batch(step).to(GPU)).loss
        loss.backward()
        if managed is not None:
            managed.gradients()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if managed is not None:
        managed.close()
    moments = [value.cpu() for state in inner.state.values() for value in state.values() if value.dim()]
    return losses, [parameter.detach().cpu() for parameter in model.parameters()], moments


def _same(one: Left, other: Left) -> None:
    assert one[0] == other[0]
    assert all(map(torch.equal, one[1], other[1]))
    assert all(map(torch.equal, one[2], other[2]))


@on_gpu
@pytest.mark.parametrize("autocast", ["none", "bf16"])
@pytest.mark.parametrize("plan", _plans(), ids=lambda plan: "-".join(one.short for one in plan))
def test_overlapping_changes_no_bit(plan: tuple[Placement, ...], autocast: str) -> None:
    """Against the same plan without overlap, for the two optimizers of a GPU and its host differ in last bits."""
    alone = _trained(plan, Inline(CudaMoves(GPU)), autocast=autocast)
    for _ in range(3):
        _same(_trained(plan, Cuda(GPU), autocast=autocast), alone)


@on_gpu
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_with_all_updates_on_the_device_the_bits_are_those_of_no_plan(activations: str) -> None:
    plan = (Placement("device", activations),) * UNITS  # type: ignore[arg-type]
    _same(_trained(plan, None), _trained(None, None))


@on_gpu
def test_what_is_allocated_stays_within_the_plan() -> None:
    made = profiled(DECODER, "none")
    for plan in _plans():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(GPU)
        before = torch.cuda.memory_allocated(GPU)
        _trained(plan, None)
        rounded = 512 * 40 * (UNITS + 2)  # each tensor begins on a multiple of 512 bytes
        assert torch.cuda.max_memory_allocated(GPU) - before <= least_peak(made, plan) + rounded


@on_gpu
def test_formats_change_on_the_host_through_the_ring() -> None:
    """More numbers than a piece of the ring holds, both ways."""
    moves, numbers = CudaMoves(GPU), torch.randn(20_000_000)
    there = torch.empty(numbers.shape, dtype=torch.bfloat16, device=GPU)
    moves.fill([there], [numbers])
    assert torch.equal(there.cpu(), numbers.bfloat16())
    (back,) = moves.to_host([there], [torch.float32])
    assert back.dtype == torch.float32
    assert torch.equal(back, numbers.bfloat16().float())
    (pinned,) = moves.to_host([there], [torch.bfloat16])
    assert pinned.is_pinned()
    (again,) = moves.to_device([pinned], GPU)
    assert torch.equal(again, there)


@on_gpu
def test_an_error_of_a_lane_reaches_the_caller() -> None:
    engine, event = Cuda(GPU), None

    def broken() -> None:
        raise ValueError("no copy")

    event = engine.event()
    engine.submit("up", (0,), 0.0, broken, event.fire)
    with pytest.raises(RuntimeError, match="the up lane failed: ValueError: no copy"):
        event.wait("a copy")
    engine.close()


def test_a_cpu_has_threads_alone() -> None:
    assert type(usual_engine(torch.device("cpu"))) is ThreadEngine
