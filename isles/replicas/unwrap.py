"""What others have put around an optimizer, looked through."""

from __future__ import annotations

from typing import Any

from isles.replicas.sync import ReplicaSync


def unwrap(optimizer: Any) -> ReplicaSync:
    """The method below what others wrap around an optimizer and give as its `.optimizer` (accelerate's `prepare` does):
    for `consolidate`, `finish`, `evaluation_weights` and what else they do not pass on. ValueError where there is none.
    """
    found = optimizer
    while not isinstance(found, ReplicaSync):
        found = getattr(found, "optimizer", None)
        if found is None:
            raise ValueError(f"there is no method of Isles below this {type(optimizer).__name__}")
    return found
