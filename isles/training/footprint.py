"""What every method adds to a worker's memory, a parameter: for `isles methods --memory`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch

from isles.comm.dry import dry_group
from isles.models.config import ModelConfig
from isles.models.factory import sketch
from isles.replicas import METHODS, method

MODEL = ModelConfig(size="35M")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes a parameter on the host, beside weights, gradients and the inner optimizer's state. always: from the start
    on; exchange: more, from the first exchange on; end: more, for validation and after the last step.
    """

    method: str
    always: float
    exchange: float
    end: float


def footprints(workers: int) -> list[Footprint]:
    """Every method with its own defaults, on a decoder of float32 weights that is only sketched, among `workers`."""
    found = []
    for name in METHODS:
        model = sketch(replace(MODEL, device="cpu"))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a run would be told is not asked for here
            kind, group = method(name), dry_group(workers, native=True)
            part = kind.local_part(model, group, kind.Config())
            optimizer = kind(part, torch.optim.SGD(part.parameters(), lr=1.0), group)
        sums = dict.fromkeys(("always", "exchange", "end"), 0.0)
        for held in optimizer.memory():
            sums[held.when] += held.nbytes / parameters
        found.append(Footprint(method=name, **sums))
    return found
