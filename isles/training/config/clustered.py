"""`pipeline.routing = "ravnest"`: whether the rest of a configuration goes with clusters. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from isles.data.config import DataConfig
from isles.errors import as_typed
from isles.models.config import ModelConfig
from isles.pipeline.config import PipelineConfig
from isles.training.config.inner import InnerConfig


def check_workers(clusters: Sequence[Sequence[int]], workers: int) -> None:
    """ValueError unless so many workers make up `clusters`; where there are several, more may stand by."""
    nodes, told = sum(len(cuts) + 1 for cuts in clusters), [list(cuts) for cuts in clusters]
    if workers < nodes:
        raise ValueError(
            f"pipeline.clusters = {told}: they are {nodes} workers, world.workers = {workers}; set it to {nodes}, or "
            "to more, who stand by"
        )
    if workers > nodes and len(clusters) == 1:
        raise ValueError(
            f"world.workers = {workers}, pipeline.clusters = {told}: who stands by begins with the weights of another "
            f"cluster, and there is one; set it to {nodes}"
        )


def refuse_clustered(
    method: str,
    clusters: int,
    pipeline: PipelineConfig,
    inner: InnerConfig,
    model: ModelConfig,
    unset: Mapping[str, tuple[object, object]],
) -> None:
    """ValueError, with the key, for what asynchronous stages cannot do. unset: by key, a value and what it must be."""
    if method not in (("localsgd",) if clusters > 1 else ("localsgd", "none")):
        raise ValueError(
            f'replicas.method = "{method}": clusters average weights every replicas.sync_every steps; choose '
            '"localsgd"' + ("" if clusters > 1 else ', or "none"')
        )
    for key, (value, wanted) in unset.items():
        if value != wanted:
            raise ValueError(
                f'{key} = {as_typed(value)}: pipeline.routing = "ravnest" wants {as_typed(wanted)}; set it to that'
            )
    if inner.max_norm and pipeline.clip == "model":
        raise ValueError(
            'pipeline.clip = "model" wants all stages at one step; with routing = "ravnest" choose "stage", or '
            "inner.max_norm = 0"
        )
    if model.own is None and model.shape().tie_embeddings:
        raise ValueError(
            "model.tie_embeddings = true: the embedding is the head as well, and they lie at two ends of a cluster; "
            "set it to false"
        )


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
    if pipeline.spares:
        raise ValueError(
            f"pipeline.spares = {pipeline.spares} acts where workers come and go only: here those of world.workers "
            "beyond the clusters' stand by; leave it out"
        )
