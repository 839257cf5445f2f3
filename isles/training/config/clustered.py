"""`pipeline.routing = "ravnest"`: whether the rest of a configuration goes with clusters. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isles.pipeline.config import PipelineConfig

if TYPE_CHECKING:
    from isles.training.config.sections import Config


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
    """Workers that read text: one a cluster. ValueError as `check_workers`."""
    if config.pipeline.ravnest.clusters:
        check_workers(config.pipeline.ravnest.clusters, config.world.workers)
    return config.replicas_in_all


def refuse_spares(pipeline: PipelineConfig) -> None:
    """ValueError where nobody comes, so that who stands by is who was too many."""
    if pipeline.ravnest.spares:
        raise ValueError(
            f"pipeline.ravnest.spares = {pipeline.ravnest.spares} acts where workers come and go only: here those of "
            "world.workers beyond the clusters' stand by; leave it out"
        )
