"""The demands of a worker on its machine: counted FLOPs per token, measured seconds per step, and whether its memory
fits. If it does not fit, settings that would make it fit.

    device    weights, tables, gradients and inner state; activations, from a profile of the model on fake tensors
    host      the method's state: anchors, momenta, messages

With a memory plan both are the plan's, plus the method's state. On a machine without a GPU, RAM is the device.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from isles.base.imports import describe
from isles.base.modes import torch_threads
from isles.base.tables import changed
from isles.memory.costs import Placement, Profile, least_peak
from isles.memory.costs import host_bytes as planned_host_bytes
from isles.memory.plan import MemoryPlan
from isles.models import autocast, build, flops_per_token
from isles.models import parameters as count_parameters
from isles.models.config import ModelConfig
from isles.network.machines import Machine, machine
from isles.plan.record import MemoryFit, WorkerPlan, device_of
from isles.replicas import method
from isles.training.config.sections import Config
from isles.training.kinds import kind_of
from isles.training.memory.plans import machine_of, profile_of
from isles.training.optimizer import inner_optimizer

_MOST_INNER = 64  # the most workers of an island to advise


def known_machine(config: Config, named: str = "") -> Machine | None:
    """The machine named by the user or the configuration, or a GPU of this machine; None: not known."""
    if named:
        return machine(named)
    if config.memory.machine:
        return machine_of(config)
    if device_of(config) == "cpu" or config.world.is_simulated or not torch.cuda.is_available():
        return None
    try:
        return machine_of(config)
    except ValueError:  # the GPU's name is unknown
        return None


def memory_fit(
    config: Config, workers: Sequence[WorkerPlan], placed: MemoryPlan | None, here: Machine, *, suggestions: bool = True
) -> MemoryFit:
    """Fit of the fullest worker: the one with most states, or the first stage, which has most passes in flight.

    suggestions: whether to look for settings that make it fit.
    """
    fullest = max(workers, key=lambda worker: worker.memory.peak)
    candidates = [fullest, *(worker for worker in workers[:1] if worker is not fullest)]
    fits = (_fit(config, worker, placed, here, suggestions) for worker in candidates)
    return max(fits, key=lambda fit: (not fit.fits, fit.device_bytes))


def _fit(
    config: Config, worker: WorkerPlan, placed: MemoryPlan | None, machine: Machine, suggestions: bool
) -> MemoryFit:
    memory, activations, profile = worker.memory, None, None
    device, host = memory.computing, memory.peak - memory.computing
    if placed is not None:
        device, host = placed.peak, host + placed.host_bytes
    elif not kind_of(config.pipeline).has_peers:
        profile = _profile(config, worker.stage or 0)
        activations = None if profile is None else _beside_states(config, profile, "keep")
        device += activations or 0
    if not machine.host_bytes:
        device, host = device + host, 0
    fits = device <= machine.device_bytes and host <= (machine.host_bytes or math.inf)
    return MemoryFit(
        machine=machine.name,
        fits=fits,
        activations=activations,
        device_bytes=device,
        host_bytes=host,
        device_room=machine.device_bytes,
        host_room=machine.host_bytes,
        suggestions=tuple(_suggestions(config, worker, profile, machine, device, host))
        if suggestions and not fits and placed is None
        else (),
    )


def _profile(config: Config, stage: int) -> Profile | None:
    """A profile of the model; None for a model that cannot be profiled on fake tensors."""
    random = torch.get_rng_state()
    try:
        return profile_of(config, stage)
    except Exception:  # the user's model may raise anything
        return None
    finally:
        torch.set_rng_state(random)


def _beside_states(config: Config, profile: Profile, activations: str) -> int:
    """Bytes on the device at the peak of a step, without weights, gradients and states."""
    batches = config.inner.accumulation if config.pipeline.stages == 1 else config.pipeline.microbatches
    placements = (Placement("device", "keep" if activations == "keep" else "recompute"),) * len(profile.units)
    states = sum(2 * part.weights + part.states for part in (*profile.units, profile.ends)) + profile.ends.buffers
    waiting = 0
    if config.pipeline.recompute:  # one pass has its activations, the others only their inputs
        waiting, profile = (profile.in_flight - 1) * profile.held, replace(profile, in_flight=1)
    return max(least_peak(profile, placements, batches) - states, 0) + waiting


def _suggestions(
    config: Config, worker: WorkerPlan, profile: Profile | None, machine: Machine, device: int, host: int
) -> list[str]:
    """Settings, each of which would make the worker fit."""
    memory, room, host_room = worker.memory, machine.device_bytes, machine.host_bytes or math.inf
    states = memory.weights + memory.gradients + memory.inner
    settings = []
    if config.memory.vectors == "memory" and device <= room:
        vectors = sum(item.nbytes for item in memory.held if item.when == "always")
        settings += ['memory.vectors = "disk"'] if host - vectors <= host_room else []
    if config.model.dtype == "float32" and device - states // 2 <= room and host <= host_room:
        settings.append('model.dtype = "bfloat16"')
    if profile is not None and host <= host_room and config.pipeline.stages == 1:
        others = device - _beside_states(config, profile, "keep")
        lean = (Placement("host" if machine.host_bytes else "device", "recompute"),) * len(profile.units)
        if others + _beside_states(config, profile, "recompute") <= room:
            settings.append('memory.method = "checkpoint"')
        elif machine.host_bytes and (moved := _profile(changed(config, {"memory.method": "auto"}), 0)) is not None:
            peak = least_peak(moved, lean, config.inner.accumulation)
            if max(peak - room, host + planned_host_bytes(moved, lean) - machine.host_bytes) <= 0:
                settings.append('memory.method = "auto"')
    if profile is not None and host <= host_room and config.pipeline.stages > 1 and not config.pipeline.recompute:
        lean = changed(config, {"pipeline.recompute": True})
        less = _beside_states(config, profile, "keep") - _beside_states(lean, profile, "keep")
        settings += ["pipeline.recompute = true"] if device - less <= room else []
    for key in ('world.inner = {} (inside = "fsdp")', "pipeline.stages = {}"):
        counts = (
            count
            for count in range(2, _MOST_INNER + 1)
            if max(device - states * (count - 1) // count - room, host / count - host_room) <= 0
        )
        best = next(counts, None)
        alone = config.pipeline.stages == 1 and config.world.inner == 1
        settings += [key.format(best)] if best is not None and alone else []
    return settings


_PROBES = 3
_SMALL = 256e6  # the most bytes of weights to allocate for counting


def counted_flops(config: ModelConfig, model: nn.Module, context: int) -> int | None:
    """FLOPs of a token, forward and backward.

    For Isles' decoder by formula; for another model, or a worker's part of the decoder, torch's counter (matrix
    products, convolutions, attention) of one forward pass, times three. `model` is a sketch; a small model that cannot
    run as a sketch is built on the CPU. None if that fails too.
    """
    if config.own is None and sum(map(torch.Tensor.numel, model.parameters())) == count_parameters(config.shape()):
        return flops_per_token(config.shape())
    try:
        forward = _forward_flops(model, context)
    except Exception as error:  # the user's model may raise anything
        if sum(parameter.nbytes for parameter in model.parameters()) > _SMALL:
            warnings.warn(f"FLOPs are not counted: the model needs real tensors ({describe(error)})", stacklevel=2)
            return None
        forward = _forward_flops(build(replace(config, device="cpu", autocast="none", compile=False), seed=0), context)
    return 3 * forward // context


@torch.no_grad()
def _forward_flops(model: nn.Module, context: int) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    device = next(model.parameters()).device
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, context + 1, dtype=torch.int64, device=device))
    return counter.get_total_flops()


def measured_step(config: Config, sequences: int, context: int) -> float:
    """Median seconds of an inner step (forward, backward, inner optimizer) of one worker with this machine to
    itself.
    """
    with torch_threads(config.world.start_threads):
        model = build(config.model, seed=config.run.seed)
        device = next(model.parameters()).device
        optimizer = inner_optimizer(model, config.inner, method(config.method).usual_inner)
        tokens = torch.zeros(sequences // config.inner.accumulation, context + 1, dtype=torch.int64, device=device)
        times = []
        for _ in range(1 + _PROBES):
            started = time.perf_counter()
            for _ in range(config.inner.accumulation):
                with autocast(config.model, device):
                    loss = model(tokens).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])
