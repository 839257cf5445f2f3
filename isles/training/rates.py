"""The course of the learning rate over a run."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from isles.training.config.inner import lr_factor
from isles.training.config.sections import Config


def rate_schedule(optimizer: Optimizer, config: Config) -> LambdaLR:
    """Stepped after each inner step. An update that is taken steps later has the rate of its own step."""
    late = config.pipeline.delay_updates
    return LambdaLR(optimizer, lambda done: lr_factor(max(done + 1 - late, 1), config.run.steps, config.inner))
