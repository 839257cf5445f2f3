"""What a configuration must leave as it is where workers join a lighthouse. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping

from isles.training.config.sections import SILENCE, WorldConfig


def refuse_silence(world: WorldConfig, who: str) -> None:
    """ValueError where `world.silence` is set, which says nothing there. who: comes and goes, such as "workers"."""
    if world.silence != SILENCE:
        raise ValueError(
            f"world.silence = {world.silence:g}: where {who} come and go it is world.lease that says when one "
            "counts as gone; set that, and leave silence out"
        )


def refuse_unsupported(settings: Mapping[str, tuple[object, object]], who: str) -> None:
    """ValueError, with the key, for the first setting that is not its default. settings: by key, (value, default)."""
    for key, (value, default) in settings.items():
        if value != default:
            raise ValueError(f"{key} = {value!r} is not there yet where {who} come and go: leave it out")
