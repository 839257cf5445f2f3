"""`pipeline.routing = "swarm"`: who serves which stage at the start, and what of a configuration goes with it. Loads no
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isles.errors import as_typed
from isles.pipeline.config import PipelineConfig
from isles.tables import refuse

if TYPE_CHECKING:
    from isles.training.config.sections import Config

IN_SWARMS: dict[str, dict[str, object]] = {
    "diloco": {"on_late": "wait"},
    "noloco": {"on_peer_failure": "solo", "prefetch_phi": False},
}
"""The outer methods between the peers of a stage, and what they must be set to: who is there is known when a round
begins, all of them take part in it, and they go on without whoever is lost.
"""


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
    """Workers that read text: the peers make up one replica. ValueError, with the key, for what a swarm cannot do."""
    method, pipeline, model = config.method, config.pipeline, config.model
    stages_of(pipeline, config.world.workers)
    keys = ("world.inner", "world.drop_outer", "memory.method", "run.start", "data.split")
    refuse(config, 'does not go with pipeline.routing = "swarm": leave it out', *keys)
    if pipeline.swarm.delay_updates:
        refuse(config, "does not go with pipeline.swarm.delay_updates: leave it out", "pipeline.swarm.stage_lost")
    for key, wanted in IN_SWARMS.get(method, {}).items():
        if (value := getattr(config.replicas, key)) != wanted:
            raise ValueError(
                f'replicas.{key} = {as_typed(value)}: pipeline.routing = "swarm" wants {as_typed(wanted)}; set it to '
                "that"
            )
    if method not in ("none", *IN_SWARMS):
        raise ValueError(
            f'replicas.method = "{method}": the peers of a stage sum their gradients in every step; choose "none", or '
            f"{' or '.join(IN_SWARMS)}, which exchange every replicas.sync_every steps"
        )
    if method != "none":
        why = f'does not go with replicas.method = "{method}": leave it out, or choose method "none"'
        refuse(config, why, "pipeline.swarm.stage_lost", "pipeline.swarm.delay_updates")
    if model.own is None and model.shape().tie_embeddings:
        raise ValueError(
            "model.tie_embeddings = true: the embedding is the head as well, and they lie at two ends of a swarm; "
            "set it to false"
        )
    return 1
