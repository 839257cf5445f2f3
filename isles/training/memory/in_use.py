"""The trainer's interface to its memory plan; without a plan it changes nothing.

A run tests its GPU before it trains, as drivers and buses differ: a small model under one plan must get the same bits
with copies concurrent to kernels and with every copy on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isles.memory.activations import Remade, count_all
from isles.memory.costs import Placement, Profile, least_peak
from isles.memory.disk import check_folder
from isles.memory.engines.base import Engine, Inline, ThreadEngine
from isles.memory.engines.cuda import Cuda, CudaMoves, usual_engine
from isles.memory.flow import PassKind
from isles.memory.meter import MemoryMeter
from isles.memory.optimizer import Managed
from isles.memory.plan import MemoryPlan, digests
from isles.memory.profile import profile
from isles.models.decoder import Decoder
from isles.models.sizes import Shape
from isles.network.machines import MACHINES
from isles.network.routing.events import Task
from isles.training.config.sections import Config
from isles.training.memory.plans import prepared, sharded_over

STEPS = 4  # of the test: the first one creates the optimizer's states, the others move them
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
    """RuntimeError if the two engines give different bits, or either fails. Takes about a second and some megabytes;
    restores the random generators. overlapping, plain: the engines; None: those of a GPU.
    """
    first = overlapping or (lambda: Cuda(device))
    other = plain or (lambda: Inline(CudaMoves(device)))
    before = torch.get_rng_state()
    try:
        profiled = profile(Decoder(_SHAPE, device="meta"), _batch(0).to("meta"), autocast="bf16")
        one, two = _trained(profiled, device, first()), _trained(profiled, device, other())
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


def _trained(profiled: Profile, device: torch.device, engine: Engine) -> list[Tensor]:
    """The losses and final weights of `STEPS` steps."""
    model = Decoder(_SHAPE, seed=0)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = list[Tensor]()
    with Managed(
        _plan(profiled), model, inner, profile=profiled, machine=MACHINES["H100"], device=device, engine=engine
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


def _plan(profiled: Profile) -> MemoryPlan:
    """A plan with placements of every kind, in the least memory that it runs in."""
    peak = least_peak(profiled, _PLACEMENTS)
    return MemoryPlan(
        placements=_PLACEMENTS,
        names=tuple(unit.name for unit in profiled.units),
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
        made_for=digests(profiled, None),
    )


_PASS_KINDS: dict[str, PassKind] = {"F": "forward", "B": "backward"}
_METERED = 3  # steps whose bytes are counted: the first one creates the states, later ones are all alike


@cache
def _trust(device: torch.device) -> None:
    """Run `try_out` once per process. ValueError if it fails."""
    try:
        try_out(device)
    except (RuntimeError, OSError) as error:
        raise ValueError(f'memory.method: {error}; choose "checkpoint"') from error


class PlannedMemory:
    """The memory of one worker of a run; without a plan it changes nothing.

    device: where the worker computes. stage: the one that it holds, if the model is cut. managed: the running plan,
    after `manage`; None: there is none.
    """

    def __init__(self, config: Config, device: torch.device, stage: int = 0) -> None:
        self.config, self.stage, self.computes = config, stage, device
        self.managed: Managed | Remade | None = None
        self.notices: list[str] = []
        """Notices for the user, after `manage`."""
        self._meter = MemoryMeter()
        self._metered = 0

    def manage(self, model: nn.Module, inner: Optimizer) -> Optimizer:
        """Start the plan, if there is one; returns the optimizer to use in place of `inner`."""
        if self.config.memory.method == "none":
            return inner
        profiled, here, plan = prepared(self.config, self.stage)
        if self.config.memory.method == "checkpoint" and not self.config.memory.emulate:
            self.managed = Remade(plan, model)
            if self._is_seen:
                count_all(self._meter, model, inner)
            return inner
        self.notices = check_folder(self.config.memory.disk, plan.disk_bytes) if plan.disk_bytes else []
        self.managed = Managed(
            plan,
            model,
            inner,
            profile=profiled,
            machine=here,
            device=self.computes,
            engine=self._engine(),
            disk=self.config.memory.disk,
            meter=self._meter,
        )
        return self.managed

    def _engine(self) -> Engine:
        """The plan's engine: on demand for virtual workers, else concurrent. ValueError if a GPU fails its test."""
        virtual = self.config.world.backend == "virtual"
        if self.computes.type == "cpu":
            return Inline() if virtual else ThreadEngine(pace=self.config.memory.emulate)
        _trust(self.computes)
        return Inline(CudaMoves(self.computes)) if virtual else usual_engine(self.computes)

    @property
    def home(self) -> torch.device:
        """The device to create the model's weights on: the host, if a plan moves some of them to the device later."""
        memory = self.config.memory
        return torch.device("cpu") if memory.method not in ("none", "checkpoint") else self.computes

    def announce(self, tasks: Sequence[Task]) -> None:
        """Announce the order of a stage's tasks in the next step."""
        if isinstance(self.managed, Managed):
            self.managed.announce([(_PASS_KINDS[task.kind], task[1:]) for task in tasks if task.kind in _PASS_KINDS])

    def device(self, model: nn.Module) -> torch.device:
        """The device that the model computes on; its parameters may be on another one."""
        return next(model.parameters()).device if self.managed is None else self.managed.device

    def metered(self) -> AbstractContextManager[Any]:
        """Context for the passes of a step: counts the bytes of the first few steps, storage by storage. To count in
        all steps would slow a small model down.
        """
        if self.managed is None or not self._is_seen or self._metered == _METERED:
            return nullcontext()
        self._metered += 1
        return self._meter

    @property
    def _is_seen(self) -> bool:
        """Whether the meter sees all allocations: not those of a GPU, nor of fsdp, whose weights are in storages that
        torch allocates and frees itself.
        """
        return self.computes.type == "cpu" and sharded_over(self.config) is None

    def _measured_peak(self) -> int | None:
        if self._is_seen:
            return self._meter.peak
        on_gpu = self.computes.type == "cuda"
        return int(torch.cuda.max_memory_allocated(self.computes)) if on_gpu else None

    def close(self) -> None:
        """Complete pending updates, end the plan's threads and restore the model's own forward."""
        if self.managed is not None:
            self.managed.close()

    def __enter__(self) -> PlannedMemory:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """As `close`; after an error without waiting."""
        if error is not None and isinstance(self.managed, Managed):
            self.managed.abandon()
        else:
            self.close()

    def record(self, seconds: float) -> dict[str, Any] | None:
        """The entries of the summary. seconds: measured, of a step."""
        if self.managed is None:
            return None
        plan = self.managed.plan
        return {
            "plan": plan.short,
            "planned_peak_bytes": plan.peak,
            "measured_peak_bytes": self._measured_peak(),
            "planned_step_seconds": plan.step,
            "measured_step_seconds": seconds,
        }
