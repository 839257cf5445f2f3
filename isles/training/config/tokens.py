"""A run that ends by tokens: how many inner steps that is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from isles.models.model_limits import limits

if TYPE_CHECKING:
    from isles.training.config.sections import Config


def tokens_a_step(config: Config, replicas: int) -> int:
    """Tokens that so many replicas, islands or single workers, train on in an inner step."""
    readers = replicas * config.world.inner
    rows = config.data.batch_size * (readers if config.data.batch_mode == "per_worker" else 1)
    return rows * config.inner.accumulation * limits(config.model).context


def ending(config: Config, every: int = 1) -> Config:
    """`config` with the `run.steps` that follow from `run.tokens`, where that is given: as many as it takes all
    replicas, rounded up to a multiple of `every`.
    """
    if not config.run.tokens:
        return config
    steps = -(-config.run.tokens // tokens_a_step(config, config.replicas_in_all))
    return replace(config, run=replace(config.run, steps=-(-steps // every) * every))


def ending_after(config: Config, replicas: int, step: int) -> Config:
    """`config`, which goes on with what `replicas` have done in `step` inner steps: with as many as the tokens that are
    left take it. From here on `run.steps` says so, for tokens are counted from the start.
    """
    if not config.run.tokens:
        return config
    left = max(config.run.tokens - step * tokens_a_step(config, replicas), 0)
    more = -(-left // tokens_a_step(config, config.replicas_in_all))
    return replace(config, run=replace(config.run, steps=max(step + more, 1), tokens=0))
