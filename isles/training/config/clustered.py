"""`pipeline.routing = "ravnest"`: whether the rest of a configuration goes with clusters. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isles.training.config.sections import Config


def check_workers(clusters: Sequence[Sequence[int]], workers: int) -> None:
    """ValueError unless so many workers make up `clusters`."""
    nodes = sum(len(cuts) + 1 for cuts in clusters)
    if workers != nodes:
        raise ValueError(
            f"pipeline.clusters = {[list(cuts) for cuts in clusters]}: they are {nodes} workers, world.workers = "
            f"{workers}; set it to {nodes}"
        )


def refuse_clustered(config: Config) -> None:
    """ValueError, with the key, for what asynchronous stages cannot do."""
    count = config.replicas_in_all
    if config.method not in (("localsgd",) if count > 1 else ("localsgd", "none")):
        raise ValueError(
            f'replicas.method = "{config.method}": clusters average weights every replicas.sync_every steps; choose '
            '"localsgd"' + ("" if count > 1 else ', or "none"')
        )
    for key, value, wanted in _terms(config):
        if value != wanted:
            raise ValueError(f'{key} = {value!r}: pipeline.routing = "ravnest" wants {wanted!r}; set it to that')
    if config.inner.max_norm and config.pipeline.clip == "model":
        raise ValueError(
            'pipeline.clip = "model" wants all stages at one step; with routing = "ravnest" choose "stage", or '
            "inner.max_norm = 0"
        )
    if config.model.own is None and config.model.shape().tie_embeddings:
        raise ValueError(
            "model.tie_embeddings = true: the embedding is the head as well, and they lie at two ends of a cluster; "
            "set it to false"
        )


def _terms(config: Config) -> list[tuple[str, object, object]]:
    return [
        ("world.inner", config.world.inner, 1),
        ("inner.accumulation", config.inner.accumulation, 1),
        ("pipeline.stage_loss", config.pipeline.stage_loss, 0.0),
        ("replicas.on_broken", getattr(config.replicas, "on_broken", "skip"), "skip"),
        ("memory.method", config.memory.method, "none"),
        ("run.start", config.run.start, ""),
    ]
