"""What a worker that joins a run takes of its machine at least, and whether that is there."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from isles.base.errors import as_typed, printable
from isles.base.memory import free_memory
from isles.models import choose_device
from isles.models.model_limits import limits, state_bytes
from isles.models.sizes import parameters
from isles.training.config.sections import Config

_TRAINED = 6  # vectors of the model's size: weights, gradients, two moments, anchor, outer momentum
_STORED = 6  # likewise on the disk: a state, and the model at the end
_LOGIT = 4  # bytes


def free_on(device: torch.device) -> float:
    """Bytes that are free on `device`: of that GPU, or of this machine."""
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_memory()


class Demand(NamedTuple):
    """Bytes of `what`: that all workers of `isles join` take at least (0: not known), and that are free."""

    what: str
    least: float
    free: float

    def __str__(self) -> str:
        least = f"{self.least / 1e6:,.1f} MB of {self.what}" if self.least else f"an unknown amount of {self.what}"
        return f"{least} at least, {self.free / 1e6:,.1f} MB are free here"


def needs(config: Config, folder: Path) -> list[Demand]:
    """Of memory, or of the GPU's, and of disk. folder: for temporary files."""
    device = choose_device(config.model)
    many = 1 if device.type == "cuda" else config.world.inner  # each worker of an island has a GPU of its own
    try:
        model = state_bytes(config.model) / config.pipeline.stages
        longest, vocab = limits(config.model)
        logits = config.data.batch_size_per_worker(1) * longest * (vocab or 0) * _LOGIT
    except (ValueError, OSError):  # a model that is not described on this machine
        model = logits = 0
    disk = Demand(f"disk in {folder}", many * _STORED * model, shutil.disk_usage(folder).free)
    return [Demand("memory", many * (_TRAINED * model + logits), free_on(device)), disk]


def refuse_beyond(config: Config, folder: Path) -> None:
    """ValueError if this machine does not have the memory or the disk that the run takes at least."""
    for need in needs(config, folder):
        if need.least > need.free:
            mend = "join with a machine that has more, or look at the run with isles join --show"
            raise ValueError(f"this run takes {need}; {mend}")


def shown(config: Config, folder: Path, missing: Mapping[str, Any]) -> str:
    """What a worker would run here, as lines of text. missing: settings that this machine must make itself, as the
    lighthouse has them.
    """
    steps = f"{config.run.tokens} tokens of all workers" if config.run.tokens else f"{config.run.steps} inner steps"
    rows = {"method": config.method, "steps": steps}
    if not any(key.startswith("model.") for key in missing):
        rows |= {} if config.model.own else {"model": f"{parameters(config.model.shape()):,} parameters"}
        rows |= {need.what.partition(" ")[0]: str(need) for need in needs(config, folder)}
    rows |= {key: f"{as_typed(value)} there; say what it is here" for key, value in missing.items()}
    return "\n".join(f"{name:<15} {printable(text, 300)}" for name, text in rows.items())
