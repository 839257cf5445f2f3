"""`pipeline.routing = "swarm"`: who serves which stage at the start, and what of a configuration goes with it. Loads no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from isles.models.config import ModelConfig
from isles.pipeline.config import PipelineConfig


def stages_of(pipeline: PipelineConfig, workers: int) -> list[list[int]]:
    """The ranks of every stage at the start. ValueError where `workers` are others than the peers that were named."""
    peers = list(pipeline.peers)
    if not peers:
        each, more = divmod(workers, pipeline.stages)
        peers = [each + (stage < more) for stage in range(pipeline.stages)]
        if not each:
            raise ValueError(
                f"pipeline.stages = {pipeline.stages}: {workers} workers leave a stage without a peer; set "
                f"world.workers to {pipeline.stages} or more"
            )
    if sum(peers) != workers:
        raise ValueError(
            f"pipeline.peers = {peers}: they are {sum(peers)} workers, world.workers = {workers}; "
            f"set it to {sum(peers)}"
        )
    begins = [sum(peers[:stage]) for stage in range(len(peers))]
    return [list(range(begin, begin + count)) for begin, count in zip(begins, peers, strict=True)]


def refuse_swarm(
    method: str, pipeline: PipelineConfig, model: ModelConfig, workers: int, unset: Mapping[str, tuple[object, object]]
) -> None:
    """ValueError, with the key, for what a swarm cannot do. unset: by key, a value and what it must be."""
    stages_of(pipeline, workers)
    for key, (value, wanted) in unset.items():
        if value != wanted:
            raise ValueError(f'{key} = {value!r}: pipeline.routing = "swarm" wants {wanted!r}; set it to that')
    if method != "none":
        raise ValueError(
            f'replicas.method = "{method}": the peers of a stage sum their gradients in every step; choose "none"'
        )
    if model.own is None and model.shape().tie_embeddings:
        raise ValueError(
            "model.tie_embeddings = true: the embedding is the head as well, and they lie at two ends of a swarm; "
            "set it to false"
        )
