"""The memory plan of a configured run: the machine, the model's profile, the search for a plan, and the refusal of
settings that a plan cannot be combined with (one line each, with the key).
"""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isles.base.errors import as_typed
from isles.base.wrapping import SpreadShares, Wrapping
from isles.memory.config import MemoryConfig
from isles.memory.costs import Profile
from isles.memory.disk import check_folder
from isles.memory.parameters import portions_of
from isles.memory.plan import MemoryPlan, from_json
from isles.memory.profile import StateBytes, adamw_bytes, fully_sharded, profile
from isles.memory.search import METHODS, Search
from isles.memory.units import units_of
from isles.models import ModelConfig, choose_device, limits, sketch
from isles.models.cuts import Piece
from isles.models.stages import Stage
from isles.network.links import links
from isles.network.machines import Machine, known_gpu, machine
from isles.network.routing.events import position
from isles.network.units import parse_bytes
from isles.pipeline.pipeline import ways_of
from isles.replicas import method
from isles.replicas.gradient.config import FSDPConfig
from isles.training.config.conflicts import refuse_conflicts
from isles.training.config.inner import inner_kind
from isles.training.config.reading import to_toml
from isles.training.config.sections import Config
from isles.training.kinds import layout_of
from isles.training.stage_runner import planned_cut

_STAYS = {"autohete": "in memory", "karma": "on the device", "checkpoint": "on the device"}
"""Where plans by a method keep weights and states; other methods use all tiers."""


def sharded_over(config: Config) -> tuple[int, bool] | None:
    """Number of workers that the weights are sharded over, and whether gathered weights stay from forward to backward
    pass; None if they are not sharded.
    """
    if config.method == "fsdp":
        assert isinstance(config.replicas, FSDPConfig)
        return config.world.workers, not config.replicas.reshard_after_forward
    if config.world.inner > 1 and config.world.inside == "fsdp":
        return config.world.inner, False
    return None


def idle_keys(memory: MemoryConfig) -> list[str]:
    """Settings in [memory] that have no effect with its method."""
    tiers, _ = METHODS[memory.method]
    moves = any(tier != "device" for tier in tiers)
    files = any(tier in ("disk", "file") for tier in tiers)
    return [
        key
        for key, acts in (
            ("update", moves or memory.update == "exact"),
            ("shard", moves or not memory.shard),
            ("disk", files or memory.vectors == "disk" or not memory.disk),
        )
        if not acts
    ]


def refusals(config: Config) -> None:
    """ValueError, with the key, for settings that a memory plan cannot be combined with."""
    memory = config.memory
    if memory.vectors == "disk":
        refuse_conflicts(config, 'memory.vectors = "disk"')
        check_folder(memory.disk, 0)
    if memory.method == "none":
        return
    for key in idle_keys(memory):
        raise ValueError(
            f'memory.{key} = {as_typed(getattr(memory, key))}: memory.method = "{memory.method}" keeps all weights and '
            f'states {_STAYS[memory.method]}: leave it out, or choose "auto"'
        )
    refuse_conflicts(config, "a plan of memory")
    if config.pipeline.stages > 1 and planned_cut(config).home:
        raise ValueError(
            "memory.method: the loss of this pipeline is computed at the origin, beside its stage: set "
            'pipeline.loss_at = "last", and model.tie_embeddings = false where the model ties them'
        )


_CROSSING = 3
"""Streams on the device at the start or end of a task: the input, the output, and the gradient of one of them."""
_PENDING = 2
"""Streams on the device between a forward pass and its backward pass: the input and the output."""


def stage_passes(config: Config, stage: int) -> tuple[int, int]:
    """The most forward passes of a stage that wait for their backward pass, and the forward passes of a step."""
    replicas, microbatches = config.replicas_in_all, config.pipeline.microbatches
    visits = microbatches * (replicas if config.pipeline.routing == "random" else 1)
    room = ways_of(config.pipeline, planned_cut(config), replicas).room.get(position(0, stage, config.pipeline.stages))
    return min(room or visits, visits), microbatches


def stage_profile(config: Config, stage: int, state_bytes: StateBytes, name: str) -> Profile:
    """The profile of a stage for one microbatch, from a sketch without values."""
    is_isles = config.model.own is None  # no cache for a user's code: it may build another model next time
    sequences = config.data.batch_size_per_worker(layout_of(config).reader(0)[1]) // config.pipeline.microbatches
    piece = planned_cut(config).pieces[stage]
    profiled, size = (_stage_profiled if is_isles else _stage_profiled.__wrapped__)(
        config.model, piece, sequences, state_bytes, f"{name}, stage {stage}"
    )
    in_flight, _ = stage_passes(config, stage)
    return replace(profiled, in_flight=in_flight, held=_PENDING * size, stream=profiled.stream + _CROSSING * size)


@lru_cache(maxsize=8)  # the methods of a plan have one model and one cut
def _stage_profiled(
    model: ModelConfig, piece: Piece, sequences: int, state_bytes: StateBytes, name: str
) -> tuple[Profile, int]:
    """The profile of a stage, and the bytes of the stream between stages."""
    module = Stage(sketch(model), piece)
    context, _ = limits(model)
    tokens = torch.empty(sequences, context, dtype=torch.int64, device="meta")
    weights = next(module.parameters())
    stream = torch.empty(sequences, context, module.width, dtype=weights.dtype, device="meta")

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, targets = batch
        if not piece.enters and torch.is_grad_enabled():
            x = x.requires_grad_()
        if piece.leaves:
            return model(x, targets, enter=piece.enters, leave=True)
        out = model(x, enter=piece.enters)
        return (out * out).sum()  # its gradient has the stream's size, as that from the next stage

    profiled = profile(
        module,
        (tokens if piece.enters else stream, tokens),
        loss=loss,
        autocast="bf16" if model.autocast == "bf16" else "none",
        state_bytes=state_bytes,
        name=name,
    )
    return profiled, stream.nbytes


_USABLE = 0.9
"""Usable fraction of a GPU's free memory: torch's allocator rounds requests up by at most a tenth."""
_CPU = "laptop-16"  # the default machine of a run on a CPU


def _gpus(config: Config) -> list[torch.device]:
    """The GPUs of this machine's workers, which share one plan, made for the smallest of them."""
    ranks = range(max(1, min(config.world.workers, torch.cuda.device_count())))
    return sorted({choose_device(config.model, rank) for rank in ranks}, key=str)


def machine_of(config: Config) -> Machine:
    """The machine that the run names, or this one (the smallest of its GPUs). ValueError if the GPU is not known."""
    if config.memory.machine:
        try:
            return machine(config.memory.machine)
        except ValueError as error:
            raise ValueError(f"memory.machine: {error}") from None
    if config.model.device == "cpu" or not torch.cuda.is_available():
        return machine(_CPU)
    cards = [torch.cuda.get_device_properties(device) for device in _gpus(config)]
    there = min(cards, key=lambda card: card.total_memory)
    if (known := known_gpu(there.name, there.total_memory)) is not None:
        return known
    raise ValueError(
        f"memory.machine: this is a {there.name} of {there.total_memory / 2**30:.0f}GiB, which is not a known machine; "
        'measure it with `isles doctor --memory --write my.toml` and set memory.machine = "my.toml"'
    )


def profile_of(config: Config, stage: int = 0) -> Profile:
    """The model's profile for one worker's batch, from a sketch without values; of a stage if the model is cut."""
    adamw = inner_kind(config.inner, method(config.method).usual_inner) == "adamw"
    name = config.model.factory or config.model.hf or config.model.name
    if config.pipeline.stages > 1:
        return stage_profile(config, stage, _states(adamw), name)
    is_isles = config.model.factory is None and config.model.hf is None  # no cache for a user's code, as above
    sequences = config.data.batch_size_per_worker(config.world.workers)
    moves, isolates = config.memory.method not in ("none", "checkpoint"), config.data.isolate_documents
    profiled = (_profiled if is_isles else _profiled.__wrapped__)(config.model, sequences, adamw, name, moves, isolates)
    if (sharded := sharded_over(config)) is not None:
        size, keeps = sharded
        batches, model = config.inner.accumulation, sketch(config.model)
        profiled = fully_sharded(
            profiled, model, size, keeps_gathered=keeps, batches=batches, state_bytes=_states(adamw)
        )
    sharing = sharers(config)
    rate = _peer_rate(config) if sharing > 1 else math.inf
    units = tuple(replace(unit, shared=sharing, peer_rate=rate) for unit in profiled.units)
    return replace(profiled, units=units)


@lru_cache(maxsize=8)  # the runs of a comparison have one model and one batch
def _profiled(model: ModelConfig, sequences: int, adamw: bool, name: str, moves: bool, isolates: bool) -> Profile:
    context, _ = limits(model)
    made = profile(
        sketch(model, isolates=isolates),
        torch.empty(sequences, context + 1, dtype=torch.int64, device="meta"),
        autocast="none" if model.autocast == "none" else "bf16",  # float16 has the same size
        state_bytes=_states(adamw),
        name=name,
        moves=moves,
    )
    return replace(made, tokens=context)  # without the extra token of a window, which is only a target


def _states(adamw: bool) -> StateBytes:
    return adamw_bytes if adamw else lambda parameter: 0


def sharers(config: Config) -> int:
    """Number of workers that shard the states on their hosts; 1: no sharding."""
    if not config.memory.shard:
        return 1
    return config.world.inner if config.world.inner > 1 else config.world.workers


def _peer_rate(config: Config) -> float:
    """Bytes per second between these workers on the simulated network; infinite on a real one."""
    if not config.world.is_simulated:
        return math.inf
    between = links(config.world.virtual.inner_links if config.world.inner > 1 else config.world.virtual.links)
    return between.way_rate(0, 1) / 8


def planned(config: Config, made: Profile, here: Machine, *, free: float = math.inf) -> MemoryPlan:
    """The plan of `config.memory`: from its file, or the fastest one found. free: free bytes of the device. ValueError,
    with the key, if there is none.
    """
    memory = config.memory
    sharing = sharers(config)
    batches = config.inner.accumulation if config.pipeline.stages == 1 else config.pipeline.microbatches
    device = _budget("device_budget", memory, min(here.device_bytes, free), here)
    host = _budget("host_budget", memory, here.host_bytes, here)
    if memory.plan:
        plan = _read(memory, made, here)
        _check_stated(memory, plan, batches, device, host)
        if plan.shared != sharing:
            raise ValueError(
                f"memory.plan = {memory.plan!r} shares states among {plan.shared} workers, this run among {sharing}: "
                "plan again, or set memory.shard and the workers as there"
            )
        if plan.peak > free:
            raise ValueError(
                f"memory.plan = {memory.plan!r} takes {plan.peak / 2**30:.3g}GiB, and {free / 2**30:.3g}GiB of this "
                "GPU are free: end what else uses it, or plan again"
            )
        return plan
    found = Search(
        made,
        here,
        method="auto" if memory.method == "none" else memory.method,
        budget=device,
        host=host,
        disk=_disk(memory.disk, here),
        update=memory.update,
        accumulation=batches,
    ).run()
    return replace(found, shared=sharing)


def _disk(folder: str, here: Machine) -> float:
    """Bytes that a plan may put into `folder`. ValueError if the machine's disk is not known."""
    if not folder:
        return 0.0
    if not here.disk_read or not here.disk_write:
        raise ValueError(
            f"memory.disk = {folder!r}: the disk of {here.name} is not known; give disk_read, disk_write and "
            f'disk_bytes in a file with base = "{here.name}" and name that as memory.machine'
        )
    check_folder(folder, 0)
    return float(shutil.disk_usage(folder).free)


def _budget(key: str, memory: MemoryConfig, most: float, here: Machine) -> float:
    text = getattr(memory, key)
    if not text:
        return most
    wanted = parse_bytes(key, text)
    if wanted > most:
        raise ValueError(
            f"memory.{key} = {text!r} is more than the {most / 2**30:.3g}GiB of {here.name}: choose less, or another "
            "memory.machine"
        )
    return wanted


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
    tiers, activations = METHODS["auto" if memory.method == "none" else memory.method]
    for one in plan.placements:
        if one.tier not in tiers or one.activations not in activations:
            raise ValueError(
                f'memory.plan = {path!r} chooses {one.short}, which memory.method = "{memory.method}" leaves out: set '
                f'it to "{plan.method}", or plan again'
            )
    return plan


def _check_stated(memory: MemoryConfig, plan: MemoryPlan, batches: int, device: float, host: float) -> None:
    """ValueError if the plan of a file does not match the configuration. device, host: bytes that it may use."""
    path = memory.plan
    if plan.update != memory.update:
        raise ValueError(
            f'memory.plan = {path!r} has {plan.update} updates: set memory.update = "{plan.update}", or plan again'
        )
    if plan.accumulation != batches:
        raise ValueError(
            f"memory.plan = {path!r} is for {plan.accumulation} batches a step, and this run adds up {batches}: plan "
            "again, or set inner.accumulation as there"
        )
    for key, takes, may in (("device_budget", plan.peak, device), ("host_budget", plan.host_bytes, host)):
        if getattr(memory, key) and takes > may:
            raise ValueError(
                f"memory.plan = {path!r} takes {takes / 2**20:,.4g}MiB, more than memory.{key} = "
                f"{as_typed(getattr(memory, key))}: plan again with it, or leave it out"
            )


def _free_bytes(config: Config) -> float:
    """Usable free bytes of the GPU with the least free memory; infinite without a GPU."""
    if choose_device(config.model).type != "cuda" or config.memory.method == "checkpoint":
        return math.inf
    return _USABLE * min(torch.cuda.mem_get_info(device)[0] for device in _gpus(config))


def _refuse_here(config: Config) -> None:
    """ValueError, with the key, for a plan that cannot run on this worker's device. On the virtual backend, and with
    memory.emulate, a part of the RAM stands for the device.
    """
    memory, device = config.memory, choose_device(config.model)
    if device.type != "cpu":
        if memory.emulate:
            raise ValueError("memory.emulate is for CPUs; on a GPU, memory.device_budget makes it smaller: take it out")
    elif not memory.emulate and config.world.backend != "virtual" and machine_of(config).host_bytes:
        raise ValueError(
            f"memory.machine = {memory.machine!r} has a device beside its host, and this worker computes on a CPU: set "
            "memory.emulate = true to try the plan out, or leave machine out"
        )


_PREPARED: dict[tuple[str, int], tuple[Profile, Machine, MemoryPlan]] = {}
"""Cache by configuration and stage, for workers that share a process."""


def prepared(config: Config, stage: int = 0) -> tuple[Profile, Machine, MemoryPlan]:
    """The profile, machine and plan of a run. ValueError, one line with its key, for what is impossible."""
    refusals(config)
    _refuse_here(config)
    key = to_toml(config), stage
    if key not in _PREPARED:
        # Building a user's model may draw random numbers: the run's draws must not depend on it.
        random = torch.get_rng_state()
        here, profiled = machine_of(config), profile_of(config, stage)
        # Bounds the cache to one configuration.
        for other in [other for other in _PREPARED if other[0] != key[0]]:
            del _PREPARED[other]
        _PREPARED[key] = profiled, here, planned(config, profiled, here, free=_free_bytes(config))
        torch.set_rng_state(random)
    return _PREPARED[key]


def step_seconds(config: Config) -> float:
    """Seconds of an inner step on the virtual clock: by the memory plan for a named machine, else of [world]; 1 with a
    plan of paths, which has seconds of its own.
    """
    if config.pipeline.skippipe.plan:
        return 1.0
    if config.memory.method == "none" or not config.memory.machine or config.pipeline.stages > 1:
        return config.world.virtual.step_seconds  # of all stages; a memory plan is for one of them
    return prepared(config)[2].step


class SketchedShares(Wrapping):
    """Stands for an inner optimizer that shards states, in a run that is only planned."""

    def __init__(self, config: Config, model: nn.Module, inner: Optimizer) -> None:
        super().__init__(inner, [parameter for parameter in model.parameters() if parameter.requires_grad])
        units = zip(units_of(model), prepared(config)[2].placements, strict=True)
        self._hosted = [unit.parameters for unit, one in units if one.tier != "device"]

    def portions(self, size: int) -> list[list[int]]:
        """As `Managed`'s."""
        return portions_of(self._hosted, size)

    def share(self, position: int, size: int, spread: SpreadShares) -> None:
        """Nothing to update."""


def sketched(config: Config, model: nn.Module, inner: Optimizer) -> Optimizer:
    """Stands for `PlannedMemory.manage` in a run that is only planned."""
    return SketchedShares(config, model, inner) if sharers(config) > 1 else inner
