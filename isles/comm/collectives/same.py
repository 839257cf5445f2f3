"""Whether all members of a group have the same."""

from __future__ import annotations

import hashlib
from collections import Counter

import torch

from isles.comm.errors import Diverged
from isles.comm.group import Group


def same_text(group: Group, text: str, detail: str) -> None:
    """As `same_number`, of a text."""
    same_number(group, hashed(text), detail)


def hashed(text: str) -> int:
    """64 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def same_number(group: Group, value: int, detail: str) -> None:
    """Diverged with `detail`, naming the odd worker, unless `value`, of 64 bits, is the same on all."""
    values = [int(theirs) for theirs in group.all_gather(torch.tensor([value], dtype=torch.int64, device="cpu"))]
    usual = Counter(values).most_common(1)[0][0]  # so that all name the odd one; of two, rank 0 is right
    for position, theirs in enumerate(values):
        if theirs != usual:
            raise Diverged(group.ranks[position], 0, detail)
