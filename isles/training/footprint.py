"""What every method adds to a worker's memory, a parameter: for `isles methods --memory`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from isles.models.config import ModelConfig
from isles.pipeline.config import PipelineConfig
from isles.replicas import METHODS, config_of, method
from isles.training.config.sections import Config, WorldConfig
from isles.training.plan.sketch import sketch_run

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
    return [_footprint(name, workers, stages) for name in METHODS if stages == 1 or not method(name).needs_whole]


def _footprint(name: str, workers: int, stages: int) -> Footprint:
    config = Config(
        method=name,
        model=replace(MODEL, device="cpu"),
        replicas=config_of(name)(),
        pipeline=PipelineConfig(stages=stages),
        world=WorldConfig(workers=workers * stages),
    )
    sketch = sketch_run(config)
    sums = dict.fromkeys(("always", "exchange", "end"), 0.0)
    for held in (held for optimizer in sketch.optimizers for held in optimizer.memory()):
        if held.when in sums:
            sums[held.when] += held.nbytes / sketch.parameters / stages
    return Footprint(method=name, **sums)
