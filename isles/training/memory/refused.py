"""What a plan of memory cannot be together with, each in one line with its key."""

from __future__ import annotations

from isles.errors import as_typed
from isles.memory.config import MemoryConfig
from isles.memory.disk import check_folder
from isles.memory.search import METHODS
from isles.replicas.gradient.config import FSDPConfig
from isles.training.config.conflicts import refuse_conflicts
from isles.training.config.sections import Config
from isles.training.staged import planned_cut

_STAYS = {"autohete": "in memory", "karma": "on the device", "checkpoint": "on the device"}
"""Where a plan by each method keeps weights and states, if not everywhere."""


def sharded_over(config: Config) -> tuple[int, bool] | None:
    """Workers that each have rows of the weights, and whether gathered ones stay from forward to backward pass; None
    where each has the weights.
    """
    if config.method == "fsdp":
        assert isinstance(config.replicas, FSDPConfig)
        return config.world.workers, not config.replicas.reshard_after_forward
    if config.world.inner > 1 and config.world.inside == "fsdp":
        return config.world.inner, False
    return None


def idle_keys(memory: MemoryConfig) -> list[str]:
    """Settings that a plan by this method would ignore."""
    places, _ = METHODS[memory.method]
    moves = any(place != "device" for place in places)
    files = any(place in ("disk", "file") for place in places)
    return [
        key
        for key, acts in (
            ("update", moves or memory.update == "exact"),
            ("shard", moves or not memory.shard),
            ("disk", files or memory.vectors == "disk" or not memory.disk),
        )
        if not acts
    ]


def refusals(config: Config) -> None:
    """ValueError, with the key, for what a plan of memory cannot be together with."""
    memory = config.memory
    if memory.vectors == "disk":
        refuse_conflicts(config, 'memory.vectors = "disk"')
        check_folder(memory.disk, 0)
    if memory.method == "none":
        return
    for key in idle_keys(memory):
        raise ValueError(
            f'memory.{key} = {as_typed(getattr(memory, key))}: memory.method = "{memory.method}" keeps all weights and '
            f'states {_STAYS[memory.method]}: leave it out, or choose "auto"'
        )
    refuse_conflicts(config, "a plan of memory")
    if config.pipeline.stages > 1 and planned_cut(config).home:
        raise ValueError(
            "memory.method: the loss of this pipeline is computed at the origin, beside its stage: set "
            'pipeline.loss_at = "last", and model.tie_embeddings = false where the model ties them'
        )
