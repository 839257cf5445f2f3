"""What a plan of memory cannot be together with, each in one line with its key."""

from __future__ import annotations

from isles.errors import as_typed
from isles.memory.config import MemoryConfig
from isles.memory.disk import check_folder
from isles.memory.search import METHODS
from isles.replicas import method
from isles.replicas.gradient.bucketed import BucketedSync
from isles.replicas.gradient.config import FSDPConfig
from isles.replicas.loop.outer import OuterSync
from isles.replicas.sync import ReplicaSync
from isles.training.config.sections import Config
from isles.training.memory.stages import refuse_staged

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
    memory, kind = config.memory, method(config.method)
    if memory.vectors == "disk":
        if not issubclass(kind, OuterSync):
            raise ValueError(
                f'memory.vectors = "disk": {config.method} keeps no vectors from round to round; leave it out, or take '
                "an outer method, such as diloco"
            )
        check_folder(memory.disk, 0)
    if memory.method == "none":
        return
    inside = method(config.world.inside) if config.world.inner > 1 else kind
    for key in idle_keys(memory):
        raise ValueError(
            f'memory.{key} = {as_typed(getattr(memory, key))}: memory.method = "{memory.method}" keeps all weights and '
            f'states {_STAYS[memory.method]}: leave it out, or choose "auto"'
        )
    if config.method == "ist":
        raise ValueError(
            "memory.method: ist changes the widths of blocks in place, so no plan holds for them: set memory.method = "
            '"none", or choose another method'
        )
    if memory.method != "checkpoint" or memory.emulate:
        _refuse_moves(config)
    if config.pipeline.stages > 1:
        refuse_staged(config)
    if config.model.compile:
        raise ValueError(
            "memory.method: a compiler decides itself what is kept and what is made again, and runs blocks as one, so "
            "none can be moved: leave out compile"
        )
    if memory.shard:
        _refuse_sharing(config, inside)
    if memory.update == "early":
        if config.inner.max_norm:
            raise ValueError(
                'memory.update = "early" updates blocks before the norm of all gradients is known: set inner.max_norm '
                '= 0, or memory.update = "exact"'
            )
        if kind.level == "optimizer":
            raise ValueError(
                f'memory.update = "early" would update blocks before {config.method} has exchanged their gradients: '
                'set memory.update = "exact"'
            )
        if getattr(config.replicas, "error_feedback", "none") != "none" and issubclass(kind, BucketedSync):
            raise ValueError(
                'memory.update = "early": with error feedback all workers may skip a step when it has begun: set '
                'replicas.error_feedback = "none", or memory.update = "exact"'
            )


def _refuse_moves(config: Config) -> None:
    """ValueError, with the key, where blocks can be kept or made again, but not moved."""
    mend = 'set memory.method = "checkpoint", without memory.emulate'
    if sharded_over(config) is not None:
        raise ValueError(
            f"memory.method: fsdp shards the parameters and keeps their storages itself, so none can be moved: {mend}"
        )
    if config.model.autocast == "fp16":
        raise ValueError(
            "memory.method: a gradient scaler may skip a step after its updates have begun: set model.autocast = "
            f'"bf16", or {mend}'
        )


def _refuse_sharing(config: Config, inside: type[ReplicaSync]) -> None:
    """ValueError where no workers are kept alike after every step, or what is shared lies on disk."""
    if not issubclass(inside, BucketedSync):
        raise ValueError(
            f"memory.shard: workers of {config.method} have weights of their own between exchanges, so none can update "
            "for another: take ddp, or islands (world.inner) with it inside, or leave memory.shard out"
        )
    if config.memory.disk and config.memory.vectors != "disk":
        raise ValueError("memory.shard: states on disk are not shared: leave memory.disk out, or memory.shard")
