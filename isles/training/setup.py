"""The start of a worker: its cores, and the expected duration of a round.

`take_cores`: a worker with a GPU of its own gets cores near it, divided among the workers whose GPUs share them.
`expectation`: printed at the start of a run on several machines: duration of a round, and the silence that is a loss.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from isles.comm.transport import LinkEstimate
from isles.replicas.sync import ReplicaSync
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
    for thread in threading.enumerate():  # those that these start have the same
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread.native_id or 0, cores)
    torch.set_num_threads(max(1, len(cores) // max(1, near[:here].count(cores))))


def has_own_gpu(config: Config, device: torch.device, here: int | None = None) -> bool:
    """Whether each worker of this machine has a GPU to itself, where this one has `device`. here: how many there would
    be, where the run is only planned.
    """
    on_gpu = device.type == "cuda" if here is None else config.model.device != "cpu"
    gpus = 1 if ":" in config.model.device else torch.cuda.device_count()
    return on_gpu and config.world.has_processes and (here or int(os.environ.get(_HERE, 1))) <= gpus


def near_cores(gpu: Any) -> set[int]:
    """The cores of the NUMA node of a GPU, from its properties; empty if the system does not report them."""
    try:
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        text = (_SYS / "bus/pci/devices" / address / "local_cpulist").read_text(encoding="ascii").strip()
        runs = [run.partition("-") for run in text.split(",") if run]
        return {core for first, _, last in runs for core in range(int(first), int(last or first) + 1)}
    except (AttributeError, OSError, ValueError):
        return set()


_ROUNDS, _STEPS = 20, 10_000


def expectation(optimizer: ReplicaSync, config: Config, link: LinkEstimate) -> str:
    """One line of text. A round is one exchange of the method; its seconds are those of its bytes, at the measured rate
    of `link`, or at world.slowest_link if there is none.
    """
    world, outline = config.world, optimizer.outline(_few(optimizer, config.run.steps))
    nbytes = (max(outline.sent) - outline.inside) / max(outline.rounds, 1)
    rate = world.slowest_link if link.rate is None else link.rate
    source = "world.slowest_link" if link.rate is None else "the slowest link of worker 0 so far"
    every = "step" if outline.every == 1 else f"{outline.every} steps"
    parts = [
        f"a round, every {every}: {_in_full(nbytes / 1e6, 3)} MB from a worker, "
        f"about {_in_full(8 * nbytes / rate, 2)} s at {_in_full(rate / 1e6, 3)} Mbit/s ({source})"
    ]
    cut = "" if link.tries_soon else f", or {2 * world.silence:g} s while a link is cut"
    parts.append(f"a worker silent for {world.silence:g} s{cut} counts as lost (world.silence)")
    return "; ".join(parts if nbytes else parts[1:])


def _in_full(number: float, digits: int) -> str:
    """Rounded to so many digits, and no power of ten in it: 1,200."""
    short = f"{number:.{digits}g}"
    return f"{float(short):,.0f}" if "e+" in short else short


def _few(optimizer: ReplicaSync, steps: int) -> int:
    """Inner steps of a run that is like this one and soon looked through: those at the beginning, and some rounds."""
    rhythm = optimizer.rhythm(steps)
    return min(steps, rhythm.start + _ROUNDS * rhythm.every, max(_STEPS, rhythm.start + rhythm.every))
