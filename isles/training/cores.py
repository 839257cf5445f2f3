"""Cores of a worker that has a GPU of its own: those near it, parted among the workers whose GPUs share them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from isles.training.config.sections import Config

_SYS = Path("/sys")
_HERE = "LOCAL_WORLD_SIZE"  # workers of this machine


def take_cores(config: Config, device: torch.device) -> None:
    """Where `world.threads` is automatic and each worker of this machine has a GPU of its own, as many torch threads
    as this one's share of the cores near its GPU, on those cores; else nothing.
    """
    if config.world.threads or not has_own_gpu(config, device):
        return
    may, here = os.sched_getaffinity(0), int(os.environ.get(_HERE, 1))
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    near = [(near_cores(gpu) & may) or may for gpu in gpus]
    cores = near[device.index]
    os.sched_setaffinity(0, cores)  # of this thread, and of those that it starts
    torch.set_num_threads(max(1, len(cores) // max(1, near[:here].count(cores))))


def has_own_gpu(config: Config, device: torch.device) -> bool:
    """Whether each worker of this machine has a GPU to itself, where this one has `device`."""
    places = 1 if ":" in config.model.device else torch.cuda.device_count()
    is_alone = int(os.environ.get(_HERE, 1)) <= places
    return device.type == "cuda" and config.world.has_processes and is_alone


def near_cores(gpu: Any) -> set[int]:
    """The cores of the NUMA node of a GPU, from its properties; none where the system does not tell."""
    try:
        place = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        told = (_SYS / "bus/pci/devices" / place / "local_cpulist").read_text(encoding="ascii").strip()
        runs = [run.partition("-") for run in told.split(",") if run]
        return {core for first, _, last in runs for core in range(int(first), int(last or first) + 1)}
    except (AttributeError, OSError, ValueError):
        return set()
