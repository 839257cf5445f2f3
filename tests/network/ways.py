"""The planner's ways as settings of the library, and their job."""

from __future__ import annotations

from isles.models.sizes import SIZES, matrices, parameters
from isles.network.links import Links
from isles.network.planner.job import Job
from isles.network.planner.ways import Way

H = 20


def named(way: Way) -> str:
    """For people."""
    return f"{way.method} {way.settings}"


def settings_of(way: Way) -> list[str]:
    """As `--set` takes them."""
    given = [f"replicas.{word.replace(' ', '')}" for word in way.settings.split(", ") if word]
    return given + ([f"replicas.sync_every={H}"] if way.rounds and not way.every else [])


def job_of(size: str, links: Links, workers: int = 8) -> Job:
    """Of a model of the library on steps of 0.1 s."""
    shape = SIZES[size]
    return Job(
        parameters=parameters(shape),
        layers=shape.layers,
        step_seconds=0.1,
        workers=workers,
        links=links,
        matrices=matrices(shape),
    )
