"""`pipeline.routing = "swarm"`: who serves which stage at the start, and what of a configuration goes with it. Loads no
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isles.pipeline.config import PipelineConfig

if TYPE_CHECKING:
    from isles.training.config.sections import Config


def stages_of(pipeline: PipelineConfig, workers: int) -> list[list[int]]:
    """The ranks of every stage at the start. ValueError where `workers` are others than the peers that were named."""
    peers = list(pipeline.swarm.peers)
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
            f"pipeline.swarm.peers = {peers}: they are {sum(peers)} workers, world.workers = {workers}; "
            f"set it to {sum(peers)}"
        )
    begins = [sum(peers[:stage]) for stage in range(len(peers))]
    return [list(range(begin, begin + count)) for begin, count in zip(begins, peers, strict=True)]


def check(config: Config) -> int:
    """Workers that read text: the peers make up one replica. ValueError as `stages_of`."""
    stages_of(config.pipeline, config.world.workers)
    return 1
