"""`pipeline.routing = "ravnest"`: whether the rest of a configuration goes with clusters. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isles.data.config import DataConfig
from isles.pipeline.config import PipelineConfig
from isles.tables import refuse

if TYPE_CHECKING:
    from isles.training.config.sections import Config


_NOT_WITH = ("world.inner", "world.drop_outer", "inner.accumulation", "pipeline.recovery.stage_loss", "memory.method")
_NOT_WITH += ("memory.vectors", "replicas.on_broken", "replicas.on_late", "run.start")


def check_workers(clusters: Sequence[Sequence[int]], workers: int) -> None:
    """ValueError unless so many workers make up `clusters`; where there are several, more may stand by."""
    nodes, told = sum(len(cuts) + 1 for cuts in clusters), [list(cuts) for cuts in clusters]
    if workers < nodes:
        raise ValueError(
            f"pipeline.ravnest.clusters = {told}: they are {nodes} workers, world.workers = {workers}; set it to "
            f"{nodes}, or to more, who stand by"
        )
    if workers > nodes and len(clusters) == 1:
        raise ValueError(
            f"world.workers = {workers}, pipeline.ravnest.clusters = {told}: who stands by begins with the weights of "
            f"another cluster, and there is one; set it to {nodes}"
        )


def check(config: Config) -> int:
    """Workers that read text: one a cluster. ValueError, with the key, for what asynchronous stages cannot do."""
    method, pipeline, model, clusters = config.method, config.pipeline, config.model, config.replicas_in_all
    if pipeline.ravnest.clusters:
        check_workers(pipeline.ravnest.clusters, config.world.workers)
    if method not in (("localsgd",) if clusters > 1 else ("localsgd", "none")):
        raise ValueError(
            f'replicas.method = "{method}": clusters average weights every replicas.sync_every steps; choose '
            '"localsgd"' + ("" if clusters > 1 else ', or "none"')
        )
    refuse(config, 'does not go with pipeline.routing = "ravnest": leave it out', *_NOT_WITH)
    if config.inner.max_norm and pipeline.clip == "model":
        raise ValueError(
            'pipeline.clip = "model" wants all stages at one step; with routing = "ravnest" choose "stage", or '
            "inner.max_norm = 0"
        )
    if model.own is None and model.shape().tie_embeddings:
        raise ValueError(
            "model.tie_embeddings = true: the embedding is the head as well, and they lie at two ends of a cluster; "
            "set it to false"
        )
    return clusters


def refuse_growing(method: str, data: DataConfig) -> None:
    """ValueError, with the key, for what does not go with clusters that may become more or fewer."""
    wanted = {
        "replicas.method": (method, "localsgd"),
        "data.batch_mode": (data.batch_mode, "per_worker"),
        "data.split": (data.split, "iid"),
    }
    for key, (value, right) in wanted.items():
        if value != right:
            raise ValueError(f'{key} = "{value}": clusters come and go here, which wants "{right}"; set it to that')


def refuse_spares(pipeline: PipelineConfig) -> None:
    """ValueError where nobody comes, so that who stands by is who was too many."""
    if pipeline.ravnest.spares:
        raise ValueError(
            f"pipeline.ravnest.spares = {pipeline.ravnest.spares} acts where workers come and go only: here those of "
            "world.workers beyond the clusters' stand by; leave it out"
        )
