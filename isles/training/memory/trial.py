"""The engine of this machine's GPU, held against itself: a small model under one plan, with copies beside kernels and
with every copy where it is asked for, must leave the same bits.

Drivers and buses differ more than tests elsewhere can cover; a run asks this one before it trains.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from isles.memory.costs import Placement, Profile, least_peak
from isles.memory.engines.base import Engine, Inline
from isles.memory.engines.cuda import Cuda, CudaMoves
from isles.memory.optimizer import Managed
from isles.memory.plan import MemoryPlan, digests
from isles.memory.profile import profile
from isles.models.decoder import Decoder
from isles.models.sizes import Shape
from isles.network.machines import MACHINES

STEPS = 4
_SHAPE = Shape(d_model=128, layers=4, heads=4, ffn=384, vocab=256, context=64, tie_embeddings=False)
_PLACEMENTS = (
    Placement("host", "swap"),
    Placement("optimizer", "recompute"),
    Placement("host", "keep"),
    Placement("optimizer", "swap"),
)


def try_out(
    device: torch.device, overlapping: Callable[[], Engine] | None = None, plain: Callable[[], Engine] | None = None
) -> None:
    """RuntimeError where the two leave different bits, or either fails. About a second, some megabytes; the random
    generators stay as they were. overlapping, plain: the two engines; None for those of a GPU.
    """
    first = overlapping or (lambda: Cuda(device))
    other = plain or (lambda: Inline(CudaMoves(device)))
    before = torch.get_rng_state()
    try:
        made = profile(Decoder(_SHAPE, device="meta"), _batch(0).to("meta"), autocast="bf16")
        one, two = _trained(made, device, first()), _trained(made, device, other())
    finally:
        torch.set_rng_state(before)
    if not all(map(torch.equal, one, two)):
        raise RuntimeError(
            f"on {device}, copies beside kernels leave other bits than copies alone: no plan that moves bytes can be "
            "trusted here"
        )


def _batch(step: int) -> Tensor:
    draw, shape = torch.Generator().manual_seed(step), (2, _SHAPE.context + 1)
    return torch.randint(0, _SHAPE.vocab, shape, generator=draw, dtype=torch.int64, device="cpu")


def _trained(made: Profile, device: torch.device, engine: Engine) -> list[Tensor]:
    """Losses and weights."""
    model = Decoder(_SHAPE, seed=0)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = list[Tensor]()
    with Managed(
        _plan(made), model, inner, profile=made, machine=MACHINES["H100"], device=device, engine=engine
    ) as managed:
        for step in range(STEPS):
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = model(_batch(step).to(device)).loss
            loss.backward()
            managed.gradients()
            managed.step()
            managed.zero_grad()
            losses.append(loss.detach())
    return [one.detach().cpu() for one in [*losses, *model.parameters()]]


def _plan(made: Profile) -> MemoryPlan:
    """Some of every kind, on as little memory as it runs in."""
    peak = least_peak(made, _PLACEMENTS)
    return MemoryPlan(
        placements=_PLACEMENTS,
        names=tuple(unit.name for unit in made.units),
        method="auto",
        update="exact",
        accumulation=1,
        budget=peak,
        peak=peak,
        step=0.0,
        bound=0.0,
        busy={},
        host_bytes=0,
        disk_bytes=0,
        made_for=digests(made, None),
    )
