"""Whether all members of a group have the same."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from isles.comm.errors import Diverged
from isles.comm.group import Group

_H = TypeVar("_H", bound=Hashable)


def same_text(group: Group, text: str, detail: str, step: int = 0) -> None:
    """Diverged with `detail`, naming the odd worker, unless `text` is the same on all."""
    odd, _ = odd_one([int(theirs) for theirs in group.all_gather(numbers(hashed(text)))])
    if odd is not None:
        raise Diverged(group.ranks[odd], step, detail)


def hashed(text: str) -> int:
    """64 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def odd_one(told: Sequence[_H]) -> tuple[int | None, int]:
    """Of what all members have told: the first position that differs from the usual, None if none does, and the first
    that is usual. So all name the same one; of two, the first is right.
    """
    usual = Counter(told).most_common(1)[0][0]
    return next((position for position, theirs in enumerate(told) if theirs != usual), None), told.index(usual)


def numbers(*values: int) -> Tensor:
    """As int64 (n,), whatever a user's defaults are."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")
