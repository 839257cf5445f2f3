"""Under which names workers, and the lighthouse, give each other states and models."""

from __future__ import annotations

STATE, ANCHORS = "state", "anchors"
"""A worker's: all of it, or anchors and outer momenta alone."""
MODEL = "model"
"""What a worker came to; the lighthouse's: the one model."""
COPIES, BESIDE = 16, 1 << 20
"""Of the model's bytes, that a state may have at most; bytes of a file beside its tensors."""


def giver_of(seat: int, place: int) -> str:
    """The giver's name of the worker at `place` in the island of `seat`."""
    return f"{seat}/{place}" if place else str(seat)


def kept_as(place: int) -> str:
    """What the lighthouse calls the state of a place in an island."""
    return f"{STATE}-{place}" if place else STATE


def state_of(stage: int, step: int) -> str:
    """The state of a swarm's stage after a step."""
    return f"stage-{stage}-step-{step}"
