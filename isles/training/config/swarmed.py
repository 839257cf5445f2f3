"""`pipeline.routing = "swarm"`: who serves which stage at the start, and what of a configuration goes with it. Loads no
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isles.errors import as_typed
from isles.pipeline.config import PipelineConfig

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


def check(config: Config) -> int:
    """Workers that read text: the peers make up one replica. ValueError, with the key, for what a swarm cannot do."""
    method, pipeline, model = config.method, config.pipeline, config.model
    unset = {
        "world.inner": (config.world.inner, 1),
        "world.drop_outer": (config.world.drop_outer, 0.0),
        "memory.method": (config.memory.method, "none"),
        "run.start": (config.run.start, ""),
        "data.split": (config.data.split, "iid"),
    }
    if method != "none" or pipeline.delay_updates:
        unset["pipeline.stage_lost"] = pipeline.stage_lost, "stop"
    if method != "none":
        unset["pipeline.delay_updates"] = pipeline.delay_updates, 0
    terms = IN_SWARMS.get(method, {})
    unset |= {f"replicas.{key}": (getattr(config.replicas, key), value) for key, value in terms.items()}
    stages_of(pipeline, config.world.workers)
    for key, (value, wanted) in unset.items():
        if value != wanted:
            raise ValueError(
                f'{key} = {as_typed(value)}: pipeline.routing = "swarm" wants {as_typed(wanted)}; set it to that'
            )
    if method not in ("none", *IN_SWARMS):
        raise ValueError(
            f'replicas.method = "{method}": the peers of a stage sum their gradients in every step; choose "none", or '
            f"{' or '.join(IN_SWARMS)}, which exchange every replicas.sync_every steps"
        )
    if pipeline.stage_lost == "rebuild" and method != "none":
        raise ValueError(
            f'pipeline.stage_lost = "rebuild" with replicas.method = "{method}": what it keeps of a stage is lost too; '
            'choose "stop", or method "none"'
        )
    if model.own is None and model.shape().tie_embeddings:
        raise ValueError(
            "model.tie_embeddings = true: the embedding is the head as well, and they lie at two ends of a swarm; "
            "set it to false"
        )
    return 1
