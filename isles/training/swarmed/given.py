"""Under which names the peers of a swarm, and its lighthouse, give each other states. Loads no torch."""

from __future__ import annotations


def state_of(stage: int, step: int) -> str:
    """Of a stage after a step."""
    return f"stage-{stage}-step-{step}"
