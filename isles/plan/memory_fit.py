"""Whether a worker's memory fits its machine, and what would make it fit.

    device    weights, tables, gradients and inner state; activations, from a profile of the model on fake tensors
    host      what the method holds there: anchors, momenta, messages

With a plan of memory both are the plan's, and what the method holds beside it. Where the RAM is the device, all is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from isles.base.tables import changed
from isles.memory.costs import Placement, Profile, least_peak
from isles.memory.costs import host_bytes as planned_host_bytes
from isles.memory.plan import MemoryPlan
from isles.network.machines import Machine, machine
from isles.plan.record import MemoryFit, WorkerPlan, device_of
from isles.training.config.sections import Config
from isles.training.kinds import kind_of
from isles.training.memory.plans import machine_of, profile_of

_MOST_INNER = 64  # workers of an island that share a replica, as advice


def known_machine(config: Config, named: str = "") -> Machine | None:
    """The machine that somebody names, the user or the configuration, or a GPU that is here; None: not known."""
    if named:
        return machine(named)
    if config.memory.machine:
        return machine_of(config)
    if device_of(config) == "cpu" or config.world.is_simulated or not torch.cuda.is_available():
        return None
    try:
        return machine_of(config)
    except ValueError:  # a GPU of an unknown name
        return None


def memory_fit(
    config: Config, workers: Sequence[WorkerPlan], placed: MemoryPlan | None, here: Machine, *, suggestions: bool = True
) -> MemoryFit:
    """Of the fullest worker: that with most states, or the first stage, which keeps most passes. suggestions: whether
    to look for them.
    """
    fullest = max(workers, key=lambda one: one.memory.peak)
    candidates = [fullest, *(one for one in workers[:1] if one is not fullest)]
    found = (_fit(config, one, placed, here, suggestions) for one in candidates)
    return max(found, key=lambda one: (not one.fits, one.device_bytes))


def _fit(config: Config, worker: WorkerPlan, placed: MemoryPlan | None, here: Machine, suggestions: bool) -> MemoryFit:
    memory, activations, made = worker.memory, None, None
    device, host = memory.computing, memory.peak - memory.computing
    if placed is not None:
        device, host = placed.peak, host + placed.host_bytes
    elif not kind_of(config.pipeline).has_peers:
        made = _profile(config, worker.stage or 0)
        activations = None if made is None else _beside_states(config, made, "keep")
        device += activations or 0
    if not here.host_bytes:
        device, host = device + host, 0
    fits = device <= here.device_bytes and host <= (here.host_bytes or math.inf)
    return MemoryFit(
        machine=here.name,
        fits=fits,
        activations=activations,
        device_bytes=device,
        host_bytes=host,
        device_room=here.device_bytes,
        host_room=here.host_bytes,
        suggestions=tuple(_suggestions(config, worker, made, here, device, host))
        if suggestions and not fits and placed is None
        else (),
    )


def _profile(config: Config, stage: int) -> Profile | None:
    """None for a model that cannot be profiled without numbers."""
    random = torch.get_rng_state()
    try:
        return profile_of(config, stage)
    except Exception:  # of the user's model, whatever it raises
        return None
    finally:
        torch.set_rng_state(random)


def _beside_states(config: Config, made: Profile, activations: str) -> int:
    """Bytes on the device at the peak of a step, beside weights, gradients and states."""
    batches = config.inner.accumulation if config.pipeline.stages == 1 else config.pipeline.microbatches
    placements = (Placement("device", "keep" if activations == "keep" else "recompute"),) * len(made.units)
    states, waiting = sum(2 * one.weights + one.states for one in (*made.units, made.ends)) + made.ends.buffers, 0
    if config.pipeline.recompute:  # one pass at a time has its activations, the others what came
        waiting, made = (made.in_flight - 1) * made.held, replace(made, in_flight=1)
    return max(least_peak(made, placements, batches) - states, 0) + waiting


def _suggestions(
    config: Config, worker: WorkerPlan, made: Profile | None, here: Machine, device: int, host: int
) -> list[str]:
    """Each alone makes it fit."""
    memory, room, host_room = worker.memory, here.device_bytes, here.host_bytes or math.inf
    states = memory.weights + memory.gradients + memory.inner
    found = []
    if config.memory.vectors == "memory" and device <= room:
        vectors = sum(one.nbytes for one in memory.held if one.when == "always")
        found += ['memory.vectors = "disk"'] if host - vectors <= host_room else []
    if config.model.dtype == "float32" and device - states // 2 <= room and host <= host_room:
        found.append('model.dtype = "bfloat16"')
    if made is not None and host <= host_room and config.pipeline.stages == 1:
        others = device - _beside_states(config, made, "keep")
        lean = (Placement("host" if here.host_bytes else "device", "recompute"),) * len(made.units)
        if others + _beside_states(config, made, "recompute") <= room:
            found.append('memory.method = "checkpoint"')
        elif here.host_bytes and (moved := _profile(changed(config, {"memory.method": "auto"}), 0)) is not None:
            peak = least_peak(moved, lean, config.inner.accumulation)
            if max(peak - room, host + planned_host_bytes(moved, lean) - here.host_bytes) <= 0:
                found.append('memory.method = "auto"')
    if made is not None and host <= host_room and config.pipeline.stages > 1 and not config.pipeline.recompute:
        lean = changed(config, {"pipeline.recompute": True})
        less = _beside_states(config, made, "keep") - _beside_states(lean, made, "keep")
        found += ["pipeline.recompute = true"] if device - less <= room else []
    for key in ('world.inner = {} (inside = "fsdp")', "pipeline.stages = {}"):
        counts = (
            count
            for count in range(2, _MOST_INNER + 1)
            if max(device - states * (count - 1) // count - room, host / count - host_room) <= 0
        )
        best = next(counts, None)
        alone = config.pipeline.stages == 1 and config.world.inner == 1
        found += [key.format(best)] if best is not None and alone else []
    return found
