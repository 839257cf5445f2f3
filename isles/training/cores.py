"""Cores of a worker that has a GPU of its own: those near it, parted among the workers whose GPUs share them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from isles.training.config.sections import Config

_SYS = Path("/sys")


def take_cores(config: Config, device: torch.device) -> None:
    """Where `world.threads` is automatic and each worker of this machine has a GPU of its own, as many torch threads
    as this one's share of the cores near its GPU, on those cores; else nothing.
    """
    if config.world.threads or not has_own_gpu(config, device):
        return
    here, gpus, may = _here(), torch.cuda.device_count(), os.sched_getaffinity(0)
    near = [(near_cores(torch.cuda.get_device_properties(index)) & may) or may for index in range(gpus)]
    cores = near[device.index]
    os.sched_setaffinity(0, cores)  # of this thread, and of those that it starts
    torch.set_num_threads(max(1, len(cores) // max(1, near[:here].count(cores))))


def has_own_gpu(config: Config, device: torch.device) -> bool:
    """Whether each worker of this machine has a GPU to itself, where this one has `device`."""
    shared = _here() > (1 if ":" in config.model.device else torch.cuda.device_count())
    return device.type == "cuda" and config.world.has_processes and not shared


def _here() -> int:
    """Workers of this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def near_cores(gpu: Any) -> set[int]:
    """The cores of the NUMA node of a GPU, from its properties; none where the system does not tell."""
    try:
        place = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        told = (_SYS / "bus/pci/devices" / place / "local_cpulist").read_text(encoding="ascii").strip()
        runs = [run.partition("-") for run in told.split(",") if run]
        return {core for first, _, last in runs for core in range(int(first), int(last or first) + 1)}
    except (AttributeError, OSError, ValueError):
        return set()
