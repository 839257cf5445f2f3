"""What a worker has counted, for others that take its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isles.training.records.checkpoint import State

Counted = dict[str, dict[str, Any]]


def total_traffic(states: Sequence[Counted], like: Counted) -> Counted:
    """Sum of traffic counters, channel by channel; zeros where there are none."""
    return {
        channel: {
            key: sum((state[channel][key] for state in states), start=type(value)()) for key, value in row.items()
        }
        for channel, row in like.items()
    }


def latest_clock(transport: dict[str, Any], own: Sequence[State]) -> dict[str, Any]:
    """A virtual transport's state at the latest clock of the workers' states `own`, its message numbers begun anew; a
    real one has none.
    """
    if "clock" not in transport:
        return transport
    latest = max(_transport(state)["clock"] for state in own)
    return {**transport, "clock": latest, "messages": {}, "latest": []}


def _transport(state: State) -> dict[str, Any]:
    return state["optimizer"]["transport"] if "optimizer" in state else state["transport"]
