"""What a run in a fixed world refuses, for it would be ignored there."""

from __future__ import annotations

from isles.training.config.sections import WorldConfig

_JOINING = ("lease", "join_state", "max_members")


def refuse_joining(world: WorldConfig) -> None:
    """ValueError, with the key, for settings of runs that workers join."""
    for key in _JOINING:
        if (value := getattr(world, key)) != getattr(WorldConfig, key):
            raise ValueError(f"world.{key} = {value}: acts where workers join a lighthouse; leave it out")
