"""The plan of memory of a configured run: its machine, its model's profile, and the search between them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from isles.memory.config import MemoryConfig
from isles.memory.costs import Profile
from isles.memory.plan import Plan, from_json
from isles.memory.profile import adamw_bytes, profile
from isles.memory.search import best
from isles.models import choose_device, limits, sketch
from isles.network.machines import Machine, machine
from isles.network.units import parse_bytes
from isles.replicas import method
from isles.training.config.inner import inner_kind
from isles.training.config.sections import Config

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
        f'memory.machine: this is a {name}, of which nothing is known; measure it with `isles doctor --memory --write '
        'my.toml` and set memory.machine = "my.toml"'
    )


def profile_of(config: Config) -> Profile:
    """The model's profile at one worker's batch, from a sketch without numbers."""
    model = sketch(config.model)
    context, _ = limits(config.model)
    sequences = config.data.batch_size_per_worker(config.world.workers)
    adamw = inner_kind(config.inner, method(config.method).usual_inner) == "adamw"
    name = config.model.factory or config.model.hf or str(config.model.size)
    made = profile(
        model,
        torch.empty(sequences, context + 1, dtype=torch.int64, device="meta"),
        autocast="bf16" if config.model.autocast == "bf16" else "none",
        state_bytes=adamw_bytes if adamw else lambda parameter: 0,
        name=name,
    )
    return replace(made, tokens=context)  # a window holds one more, the target of its last


def planned(config: Config, made: Profile, here: Machine, *, replica_bytes: int = 0) -> Plan:
    """The plan of `config.memory`: that of its file, or the fastest. ValueError that names the key for what cannot be."""
    memory = config.memory
    if memory.plan:
        return _read(memory.plan, made, here)
    device = _budget("device_budget", memory, here.device_bytes, here)
    host = _budget("host_budget", memory, here.host_bytes, here)
    return best(
        made,
        here,
        method="auto" if memory.method == "none" else memory.method,
        device_budget=device,
        host_budget=host,
        disk_budget=0.0,
        update=memory.update,
        accumulation=config.inner.accumulation,
        replica_bytes=replica_bytes,
    )


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


def _read(path: str, made: Profile, here: Machine) -> Plan:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"memory.plan = {path!r}: cannot be read ({error}); name a plan's file") from None
    plan = from_json(text, f"memory.plan = {path!r}")
    plan.check(made, here)
    return plan


def refusals(config: Config) -> None:
    """ValueError, with the key, for what a plan of memory cannot be together with."""
    memory = config.memory
    if memory.method == "none":
        return
    if memory.update == "early" and config.inner.max_norm:
        raise ValueError(
            'memory.update = "early" updates blocks before the norm of all gradients is known: set inner.max_norm = 0, '
            'or memory.update = "exact"'
        )
    device = choose_device(config.model)
    if memory.emulate and device.type != "cpu":
        raise ValueError("memory.emulate is for CPUs; on a GPU, memory.device_budget makes it smaller: take it out")
