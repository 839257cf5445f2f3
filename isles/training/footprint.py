"""What every method adds to a worker's memory, a parameter: for `isles methods --memory`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch

from isles.comm.dry import dry_mesh
from isles.models.config import ModelConfig
from isles.models.cuts import decoder_costs
from isles.models.factory import sketch
from isles.models.stages import Stage
from isles.pipeline.pipeline import cut_of
from isles.replicas import METHODS, method
from isles.replicas.replica import Plain
from isles.replicas.sync import ReplicaSync

MODEL = ModelConfig(size="eager-35M")


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes a parameter on the host, beside weights, gradients and the inner optimizer's state. always: from the start
    on; exchange: more, from the first exchange on; end: more, for validation and after the last step.
    """

    method: str
    always: float
    exchange: float
    end: float


def footprints(workers: int, stages: int = 1) -> list[Footprint]:
    """Every method with its own defaults, on a decoder of float32 weights that is only sketched, among `workers`
    replicas. stages: of each; a worker's bytes are then a mean over them, a parameter of the whole model, and methods
    that need it whole are left out. ValueError for more stages than blocks.
    """
    if stages < 1:
        raise ValueError(f"--stages {stages}: choose 1 or more")
    return [one for name in METHODS if (one := _footprint(name, workers, stages)) is not None]


def _footprint(name: str, workers: int, stages: int) -> Footprint | None:
    config = replace(MODEL, device="cpu")
    parameters = sum(parameter.numel() for parameter in sketch(config).parameters())
    sums = dict.fromkeys(("always", "exchange", "end"), 0.0)
    for number in range(stages):
        try:
            optimizer = _optimizer(name, config, workers, stages, number)
        except ValueError:
            if stages > 1 and method(name).needs_whole:
                return None
            raise
        for held in optimizer.memory():
            if held.when in sums:
                sums[held.when] += held.nbytes / parameters / stages
    return Footprint(method=name, **sums)


def _optimizer(name: str, config: ModelConfig, workers: int, stages: int, number: int) -> ReplicaSync:
    """Of the worker that holds that stage, or all of the model."""
    kind, model = method(name), sketch(config)
    mesh = dry_mesh(workers * stages, stage=stages, inner=1, rank=number, native=True)
    if stages > 1:
        model = Stage(model, cut_of(model, stages, costs=decoder_costs(config.shape())).pieces[number])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a run would be told is not asked for here
        part = kind.local_part(model, mesh.outer, kind.Config())
        inner = torch.optim.SGD(part.parameters(), lr=1.0)
        return kind(part, Plain(part, inner, peers=mesh.stage, charged=True) if stages > 1 else inner, mesh.outer)
