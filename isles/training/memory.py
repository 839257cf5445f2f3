"""The plan of memory of a configured run: its machine, its model's profile, the search between them, and the optimizer
that runs what was found.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from isles.memory.activations import Remade, count_all
from isles.memory.config import MemoryConfig
from isles.memory.costs import Profile
from isles.memory.disk import check_folder
from isles.memory.engines.inline import Inline
from isles.memory.engines.paced import Paced
from isles.memory.managed import Managed, manage
from isles.memory.meter import MemoryMeter
from isles.memory.passes import PassWay
from isles.memory.plan import MemoryPlan, from_json
from isles.memory.profile import adamw_bytes, profile
from isles.memory.profiling.fully_sharded import fully_sharded
from isles.memory.search import METHODS, best
from isles.memory.sharing import portions_of
from isles.memory.units import units_of
from isles.models import choose_device, limits, sketch
from isles.network.machines import Machine, machine
from isles.network.named import links
from isles.network.routing.routes import Task
from isles.network.units import parse_bytes
from isles.replicas import method
from isles.training.config.inner import inner_kind
from isles.training.config.reading import to_toml
from isles.training.config.sections import Config
from isles.training.memory_refused import refusals, sharded_over
from isles.training.memory_stages import stage_profile
from isles.wrapping import SpreadShares, Wrapping

_WAYS: dict[str, PassWay] = {"F": "forward", "B": "backward"}
_METERED = 3  # steps whose bytes are counted: the first makes the states, the others are like all that follow
_CPU = "laptop-16"  # the machine of a run on a CPU that names none


def machine_of(config: Config) -> Machine:
    """The machine that the run names, or what is here. ValueError where there is a GPU of no known name."""
    if config.memory.machine:
        try:
            return machine(config.memory.machine)
        except ValueError as error:
            raise ValueError(f"memory.machine: {error}") from None
    if config.model.device == "cpu" or not torch.cuda.is_available():
        return machine(_CPU)
    name = torch.cuda.get_device_name()
    for known in ("H200", "H100", "RTX 4090", "RTX 3060"):
        if known in name:
            return machine(known)
    raise ValueError(
        f"memory.machine: this is a {name}, of which nothing is known; measure it with `isles doctor --memory --write "
        'my.toml` and set memory.machine = "my.toml"'
    )


def profile_of(config: Config, stage: int = 0) -> Profile:
    """The model's profile at one worker's batch, from a sketch without numbers; of a stage where it is cut."""
    adamw = inner_kind(config.inner, method(config.method).usual_inner) == "adamw"
    name = config.model.factory or config.model.hf or str(config.model.size)
    if config.pipeline.stages > 1:
        return stage_profile(config, stage, adamw_bytes if adamw else lambda parameter: 0, name)
    model = sketch(config.model)
    context, _ = limits(config.model)
    sequences = config.data.batch_size_per_worker(config.world.workers)
    state_bytes = adamw_bytes if adamw else lambda parameter: 0
    made = profile(
        model,
        torch.empty(sequences, context + 1, dtype=torch.int64, device="meta"),
        autocast="none" if config.model.autocast == "none" else "bf16",  # float16 takes the same bytes
        state_bytes=state_bytes,
        name=name,
    )
    if (sharded := sharded_over(config)) is not None:
        size, keeps = sharded
        batches = config.inner.accumulation
        made = fully_sharded(made, model, size, keeps_gathered=keeps, batches=batches, state_bytes=state_bytes)
    sharing = sharers(config)
    rate = _peer_rate(config) if sharing > 1 else math.inf
    units = tuple(replace(unit, shared=sharing, peer_rate=rate) for unit in made.units)
    return replace(made, tokens=context, units=units)  # a window holds one more, the target of its last


def sharers(config: Config) -> int:
    """Workers that share the states on their hosts; 1: nobody does."""
    if not config.memory.shard:
        return 1
    return config.world.inner if config.world.inner > 1 else config.world.workers


def _peer_rate(config: Config) -> float:
    """Bytes a second between them: of the simulated network; else of a network that is not in the way."""
    if not config.world.is_simulated:
        return math.inf
    between = links(config.world.inner_links if config.world.inner > 1 else config.world.links)
    return between.way_rate(0, 1) / 8


def planned(config: Config, made: Profile, here: Machine, *, replica_bytes: int = 0) -> MemoryPlan:
    """The plan of `config.memory`: that of its file, or the fastest. ValueError, with the key, for what cannot be."""
    memory = config.memory
    sharing = sharers(config)
    if memory.plan:
        plan = _read(memory, made, here)
        if plan.shared != sharing:
            raise ValueError(
                f"memory.plan = {memory.plan!r} shares states among {plan.shared} workers, this run among {sharing}: "
                "plan again, or set memory.shard and the workers as there"
            )
        return plan
    device = _budget("device_budget", memory, here.device_bytes, here)
    host = _budget("host_budget", memory, here.host_bytes, here)
    found = best(
        made,
        here,
        method="auto" if memory.method == "none" else memory.method,
        device_budget=device,
        host_budget=host,
        disk_budget=_disk(memory.disk, here),
        update=memory.update,
        accumulation=config.inner.accumulation if config.pipeline.stages == 1 else config.pipeline.microbatches,
        replica_bytes=replica_bytes,
    )
    return replace(found, shared=sharing)


def _disk(folder: str, here: Machine) -> float:
    """Bytes that a plan may put there. ValueError where nothing is known of the machine's disk."""
    if not folder:
        return 0.0
    if not here.disk_read or not here.disk_write:
        raise ValueError(
            f"memory.disk = {folder!r}: nothing is known of the disk of {here.name}; give disk_read, disk_write and "
            f'disk_bytes in a file with base = "{here.name}" and name that as memory.machine'
        )
    check_folder(folder, 0)
    return float(shutil.disk_usage(folder).free)


def _budget(key: str, memory: MemoryConfig, most: float, here: Machine) -> float:
    given = getattr(memory, key)
    if not given:
        return most
    asked = parse_bytes(key, given)
    if asked > most:
        raise ValueError(
            f"memory.{key} = {given!r} is more than the {most / 2**30:.3g}GiB of {here.name}: choose less, or another "
            "memory.machine"
        )
    return asked


def _read(memory: MemoryConfig, made: Profile, here: Machine) -> MemoryPlan:
    path = memory.plan
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"memory.plan = {path!r}: cannot be read ({error}); name a plan's file") from None
    plan = from_json(text, f"memory.plan = {path!r}")
    plan.check(made, here)
    if plan.disk_bytes and not memory.disk:
        raise ValueError(f"memory.plan = {path!r} puts units on disk: set memory.disk to a folder")
    places, activations = METHODS["auto" if memory.method == "none" else memory.method]
    for one in plan.placements:
        if one.place not in places or one.activations not in activations:
            raise ValueError(
                f'memory.plan = {path!r} chooses {one.short}, which memory.method = "{memory.method}" leaves out: set '
                f'it to "{plan.method}", or plan again'
            )
    return plan


def _refuse_here(config: Config) -> None:
    """ValueError, with the key, for a plan that cannot run on what this worker computes with."""
    memory, device = config.memory, choose_device(config.model)
    if device.type != "cpu":
        if memory.emulate:
            raise ValueError("memory.emulate is for CPUs; on a GPU, memory.device_budget makes it smaller: take it out")
        if memory.method != "checkpoint":
            raise ValueError(
                f'memory.method = "{memory.method}" moves bytes, which runs do on CPUs only until that is tried on a '
                'GPU: choose "checkpoint"'
            )
    elif not _stands_for_a_device(config) and machine_of(config).host_bytes:
        raise ValueError(
            f"memory.machine = {memory.machine!r} has a device beside its host, and this worker computes on a CPU: set "
            "memory.emulate = true to try the plan out, or leave machine out"
        )


def _stands_for_a_device(config: Config) -> bool:
    """Whether part of the RAM plays the device: on the virtual backend, and where that was asked for."""
    return config.memory.emulate or config.world.backend == "virtual"


_PREPARED: dict[tuple[str, int], tuple[Profile, Machine, MemoryPlan]] = {}
"""By configuration and stage: workers that share a process ask once."""


def prepared(config: Config, stage: int = 0) -> tuple[Profile, Machine, MemoryPlan]:
    """What a run with a plan needs. ValueError, one line with its key, for whatever cannot be."""
    refusals(config)
    _refuse_here(config)
    key = to_toml(config), stage
    if key not in _PREPARED:
        random = torch.get_rng_state()
        here, made = machine_of(config), profile_of(config, stage)
        for other in [other for other in _PREPARED if other[0] != key[0]]:
            del _PREPARED[other]
        _PREPARED[key] = made, here, planned(config, made, here)
        torch.set_rng_state(random)
    return _PREPARED[key]


def step_seconds(config: Config) -> float:
    """Of the virtual clock: those of the plan for a named machine, else those of [world]. A plan of paths has seconds
    of its own.
    """
    if config.pipeline.routing == "skippipe":
        return 1.0
    if config.memory.method == "none" or not config.memory.machine or config.pipeline.stages > 1:
        return config.world.step_seconds  # of all stages; a plan knows one of them
    return prepared(config)[2].step


class SketchedShares(Wrapping):
    """An inner optimizer that will share states, for a run that is only planned."""

    def __init__(self, config: Config, model: nn.Module, inner: Optimizer) -> None:
        super().__init__(inner, [parameter for parameter in model.parameters() if parameter.requires_grad])
        units = zip(units_of(model), prepared(config)[2].placements, strict=True)
        self._hosted = [unit.parameters for unit, one in units if one.place != "device"]

    def portions(self, size: int) -> list[list[int]]:
        """As `Managed`'s."""
        return portions_of(self._hosted, size)

    def share(self, position: int, size: int, spread: SpreadShares) -> None:
        """Nothing is updated."""


def sketched(config: Config, model: nn.Module, inner: Optimizer) -> Optimizer:
    """What stands for `PlannedMemory.manage` where nothing is run."""
    return SketchedShares(config, model, inner) if sharers(config) > 1 else inner


class PlannedMemory:
    """The memory of one worker of a run: nothing special, or a plan at work."""

    def __init__(self, config: Config, stage: int = 0) -> None:
        self.config, self.stage = config, stage
        self.managed: Managed | Remade | None = None
        self.notices: list[str] = []
        """What a user should know, once it is managed."""
        self._meter = MemoryMeter()
        self._metered = 0

    def manage(self, model: nn.Module, inner: Optimizer) -> Optimizer:
        """The inner optimizer, under the plan where there is one."""
        if self.config.memory.method == "none":
            return inner
        made, here, plan = prepared(self.config, self.stage)
        if self.config.memory.method == "checkpoint" and not self.config.memory.emulate:
            self.managed = Remade(plan, model)
            if self._is_seen:
                count_all(self._meter, model, inner)
            return inner
        self.notices = check_folder(self.config.memory.disk, plan.disk_bytes) if plan.disk_bytes else []
        virtual = self.config.world.backend == "virtual"
        engine = Inline() if virtual else Paced(pace=self.config.memory.emulate)
        self.managed = manage(
            plan,
            model,
            inner,
            profile=made,
            machine=here,
            engine=engine,
            disk=self.config.memory.disk,
            meter=self._meter,
        )
        return self.managed

    def announce(self, tasks: Sequence[Task]) -> None:
        """The order of a stage's tasks in the step that begins."""
        if isinstance(self.managed, Managed):
            self.managed.announce([(_WAYS[task.kind], task[1:]) for task in tasks if task.kind in _WAYS])

    def device(self, model: nn.Module) -> torch.device:
        """Where the model computes; its parameters may lie elsewhere."""
        return next(model.parameters()).device if self.managed is None else self.managed.device

    def metered(self) -> AbstractContextManager[Any]:
        """Around the passes of each step: the first few are counted, storage by storage; counting all would cost a
        small model much of its speed.
        """
        if self.managed is None or not self._is_seen or self._metered == _METERED:
            return nullcontext()
        self._metered += 1
        return self._meter

    @property
    def _is_seen(self) -> bool:
        """Whether every byte is made where the meter sees it: not by a GPU, and not by fsdp, whose weights come and go
        in storages of torch's own.
        """
        return choose_device(self.config.model).type == "cpu" and sharded_over(self.config) is None

    def _measured_peak(self) -> int | None:
        if self._is_seen:
            return self._meter.peak
        on_gpu = choose_device(self.config.model).type == "cuda"
        return int(torch.cuda.max_memory_allocated()) if on_gpu else None

    def close(self) -> None:
        """Let updates land, end the plan's threads and give the model its own forward back."""
        if self.managed is not None:
            self.managed.close()

    def __enter__(self) -> PlannedMemory:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """As `close`; after an error nothing is waited for."""
        if error is not None and isinstance(self.managed, Managed):
            self.managed.abandon()
        else:
            self.close()

    def told(self, seconds: float) -> dict[str, Any] | None:
        """For the summary. seconds: of a step, as it was."""
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
