"""A worker's random generators, which dropout and the like draw from: the host's, and that of its CUDA device.

Both are in a checkpoint, so that a resumed run draws what it would have drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch


def draws_seed(seed: int, rank: int) -> int:
    """Of a worker's draws: every worker has its own, the same on every backend."""
    return int.from_bytes(hashlib.sha256(f"{seed} worker {rank}".encode()).digest()[:4], "little")


def seed_draws(seed: int, rank: int) -> None:
    """Begin a worker's draws, on the host and on every device."""
    torch.manual_seed(draws_seed(seed, rank))


def draws_state(device: torch.device) -> dict[str, Any]:
    """Where the draws of a worker that computes on `device` stand."""
    on_cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"random": torch.get_rng_state(), "random_cuda": on_cuda}


def restore_draws(state: Mapping[str, Any], device: torch.device) -> None:
    """Go on drawing from `draws_state`. One that holds nothing of a CUDA device, for it was taken on another kind of
    device or by an earlier version, leaves that device's draws where they are: at their beginning.
    """
    torch.set_rng_state(state["random"])
    on_cuda = state.get("random_cuda")
    if device.type == "cuda" and on_cuda is not None:
        torch.cuda.set_rng_state(on_cuda, device)


def new_draws(seed: int, rank: int) -> dict[str, Any]:
    """The state of a worker that has drawn nothing yet."""
    return {"random": torch.Generator().manual_seed(draws_seed(seed, rank)).get_state(), "random_cuda": None}


def carried_draws(state: Mapping[str, Any]) -> dict[str, Any]:
    """What of a worker's state are its draws."""
    return {"random": state["random"], "random_cuda": state.get("random_cuda")}
