"""What a run whose workers come and go refuses, for it would be ignored there; `refuse_joining`: what others refuse."""

from __future__ import annotations

from isles.tables import given, refuse
from isles.training.config.sections import Config
from isles.training.config.world import WorldConfig

_IDLE = {
    "world.silence": "world.elastic.lease says when one counts as gone",
    "run.keep_checkpoints": "the newest state alone is kept",
    "world.join_deadline": "the first round waits for its workers however long it takes",
    "world.pipeline_deadline": "there are no stages that wait for each other",
}


def refuse_unsupported(config: Config, who: str, *keys: str) -> None:
    """ValueError, with the key, for the first of these settings that is not its default. who: comes and goes, such as
    "workers".
    """
    refuse(config, f"is not there yet where {who} come and go: leave it out", *keys)


def refuse_idle(config: Config, who: str, *keys: str) -> None:
    """ValueError, with the key, for settings that say nothing there. who: as above."""
    for key in keys:
        refuse(config, f"does not act where {who} come and go, for {_IDLE[key]}: leave it out", key)


def refuse_full(world: WorldConfig, founders: int) -> None:
    """ValueError where the first round waits for more than may be there."""
    if world.elastic.max_members < founders:
        raise ValueError(
            f"world.elastic.max_members = {world.elastic.max_members}: the first round waits for {founders}; choose as "
            "many or more, or fewer world.workers (--founders)"
        )


def refuse_unplayed(config: Config) -> None:
    """ValueError, with the key, for what the virtual clock does not play where workers come and go."""
    idle = {"max_members": "the trace says who comes"}
    if config.pipeline.routing in ("swarm", "ravnest"):
        idle["join_state"] = "who comes takes all that a peer of its stage has"
    if config.pipeline.routing == "swarm":
        idle["lease"] = "one that stands still is waited for, for world.pipeline_deadline"
    for key, why in idle.items():
        refuse(config, f"does not go with --churn, where {why}: leave it out", f"world.elastic.{key}")


def refuse_joining(world: WorldConfig) -> None:
    """ValueError, with the key, for settings of runs that workers join, in a fixed world."""
    for key, value in given(world.elastic):
        raise ValueError(f"world.elastic.{key} = {value}: acts where workers join a lighthouse; leave it out")
