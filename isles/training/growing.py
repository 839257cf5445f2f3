"""What a run whose workers come and go refuses, for it would be ignored there; `refuse_joining`: what others refuse."""

from __future__ import annotations

from collections.abc import Mapping

from isles.errors import as_typed
from isles.training.config.sections import SILENCE, Config, RunConfig, WorldConfig

_JOINING = ("lease", "join_state", "max_members")
_WAITS = {
    "join_deadline": "the first round waits for its workers however long it takes",
    "pipeline_deadline": "there are no stages that wait for each other",
}


def refuse_unsupported(settings: Mapping[str, tuple[object, object]], who: str) -> None:
    """ValueError, with the key, for the first setting that is not its default. settings: by key, (value, default). who:
    comes and goes, such as "workers".
    """
    for key, (value, default) in settings.items():
        if value != default:
            raise ValueError(f"{key} = {as_typed(value)} is not there yet where {who} come and go: leave it out")


def refuse_silence(world: WorldConfig, who: str) -> None:
    """ValueError where `world.silence` is set, which says nothing there. who: as above."""
    if world.silence != SILENCE:
        raise ValueError(
            f"world.silence = {world.silence:g}: where {who} come and go it is world.lease that says when one "
            "counts as gone; set that, and leave silence out"
        )


def refuse_kept(run: RunConfig) -> None:
    """ValueError for more states than a lighthouse keeps."""
    if run.keep_checkpoints != RunConfig.keep_checkpoints:
        raise ValueError(
            f"run.keep_checkpoints = {run.keep_checkpoints}: where workers come and go the newest state is kept alone; "
            "leave it out"
        )


def refuse_full(world: WorldConfig, founders: int) -> None:
    """ValueError where the first round waits for more than may be there."""
    if world.max_members < founders:
        raise ValueError(
            f"world.max_members = {world.max_members}: the first round waits for {founders}; choose as many or more, "
            "or fewer world.workers (--founders)"
        )


def refuse_waits(world: WorldConfig, *keys: str) -> None:
    """ValueError, with the key, for deadlines of waits that there are none of here."""
    for key in keys:
        if (value := getattr(world, key)) != getattr(WorldConfig, key):
            raise ValueError(f"world.{key} = {value:g}: where workers come and go {_WAITS[key]}; leave it out")


def refuse_unplayed(config: Config) -> None:
    """ValueError, with the key, for what the virtual clock does not play where workers come and go."""
    idle = {"max_members": "the trace says who comes"}
    if config.pipeline.routing in ("swarm", "ravnest"):
        idle["join_state"] = "who comes takes all that a peer of its stage has"
    if config.pipeline.routing == "swarm":
        idle["lease"] = "one that stands still is waited for, for world.pipeline_deadline"
    for key, why in idle.items():
        if (value := getattr(config.world, key)) != getattr(WorldConfig, key):
            raise ValueError(f"world.{key} = {as_typed(value)}: with --churn {why}; leave it out")


def refuse_joining(world: WorldConfig) -> None:
    """ValueError, with the key, for settings of runs that workers join, in a fixed world."""
    for key in _JOINING:
        if (value := getattr(world, key)) != getattr(WorldConfig, key):
            raise ValueError(f"world.{key} = {value}: acts where workers join a lighthouse; leave it out")
