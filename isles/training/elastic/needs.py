"""What a worker that joins a run takes of its machine at least, and whether that is there."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from isles.base.errors import as_typed, printable
from isles.base.scratch import free_memory
from isles.models import choose_device
from isles.models.model_limits import limits, state_bytes
from isles.models.sizes import parameters
from isles.training.config.sections import Config

_TRAINED = 6  # vectors of the model's size: weights, gradients, two moments, anchor, outer momentum
_STORED = 6  # likewise on the disk: a state, and the model at the end
_LOGIT = 4  # bytes


class Needs(NamedTuple):
    """Bytes: of the model (0: unknown), of memory or GPU memory, of disk for temporary files; and what is free."""

    model: float
    memory: float
    disk: float
    free: float
    room: float


def needs(config: Config, folder: Path) -> Needs:
    """What all workers that `isles join` starts once take. folder: where their temporary files are."""
    device = choose_device(config.model)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    room, many = float(shutil.disk_usage(folder).free), config.world.inner if device.type == "cpu" else 1
    try:
        model = state_bytes(config.model) / config.pipeline.stages
        longest, vocab = limits(config.model)
    except (ValueError, OSError):  # a model that is not described on this machine
        return Needs(0.0, 0.0, 0.0, free, room)
    logits = config.data.batch_size_per_worker(1) * longest * (vocab or 0) * _LOGIT
    return Needs(model, many * (_TRAINED * model + logits), many * _STORED * model, free, room)


def refuse_beyond(config: Config, folder: Path) -> None:
    """ValueError if this machine does not have the memory or the disk that the run takes at least."""
    found = needs(config, folder)
    mend = "join with a machine that has more, or look at the run with isles join --show"
    for what, wanted, free in (("memory", found.memory, found.free), (f"disk in {folder}", found.disk, found.room)):
        if wanted > free:
            raise ValueError(f"this run takes {_mb(wanted)} of {what} at least, {_mb(free)} are free here; {mend}")


def shown(config: Config, folder: Path, missing: Mapping[str, Any]) -> str:
    """What a worker would run here, as lines of text. missing: settings that this machine must make itself, as the
    lighthouse has them.
    """
    found, steps = needs(config, folder), f"{config.run.steps} inner steps"
    size, at_least = "not known without the settings below", "not known"
    disk = at_least
    if found.model and not any(key.startswith("model.") for key in missing):
        size, at_least, disk = _mb(found.model), f"{_mb(found.memory)} at least", f"{_mb(found.disk)} at least"
        size += f", {parameters(config.model.shape()):,} parameters" if config.model.own is None else ""
    rows = {
        "method": config.method,
        "model": size,
        "memory": f"{at_least}, {_mb(found.free)} are free",
        "disk": f"{disk}, {_mb(found.room)} are free in {folder}",
        "steps": f"{config.run.tokens} tokens of all workers" if config.run.tokens else steps,
        "batch": f"{config.data.batch_size} sequences",
    }
    rows |= {key: f"{printable(as_typed(value), 100)} there; say what it is here" for key, value in missing.items()}
    return "\n".join(f"{name:<15} {printable(text, 300)}" for name, text in rows.items())


def _mb(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"
