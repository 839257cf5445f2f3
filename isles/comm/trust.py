"""Checks that a peer's payload can be a share of this round: finite, and not much larger than earlier shares.

    accepted    every |x_i| finite,  rms(x) <= ratio * max(median, own)

median: of the newest 101 shares of the same kind that were accepted before, this worker's own among them. own: this
worker's share of this round, so that what grows for all, as outer gradients do while a rate is warmed up, is no
offence. Root mean squares are compared and not norms, for shards differ in length. Shares of zeros count for nothing.

This detects garbage, not deliberate falsification: a peer within the ratio can still pull a mean where it likes.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from isles.comm.errors import Refused

BLOCK = 1 << 17  # entries that stay in cache between the look and what is done with them next
_REMEMBERED = 101
_FEW = 256  # shorter shares need only be finite: a few entries may well be near zero once
_SOME = 16
_CHECKED = ("outer", "inner", "pipeline")  # channels; what users average among themselves is theirs


JUMPS = 100.0
"""How many times more than `world.trust_ratio` a gradient may be, and what travels between stages: those of single
steps jump, on one bad batch.
"""


class PeerTrust:
    """What one worker has accepted from its peers. ratio: see above; inf: payloads need only be finite."""

    def __init__(self, ratio: float = 10.0) -> None:
        self.ratio = ratio
        self.refused = 0
        """Payloads that were not accepted."""
        self._accepted: defaultdict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    def looks_at(self, channel: str) -> bool:
        return channel in _CHECKED

    def own_every(self, kind: Hashable) -> int:
        """Of this worker's own share of a kind, so many-th block needs to be looked at: all while it is all that is
        known, then few, for it only says whether all have grown.
        """
        return _SOME if self._accepted[kind] else 1

    def check(self, kind: Hashable, theirs: Mapping[int, float], own: float, entries: int, leeway: float = 1.0) -> None:
        """Accept shares of one kind by their mean squares: those of peers by rank, and this worker's `own` (0: it has
        none). entries: how long they are. leeway: how many times more than `ratio` one may be. Refused for the first
        that cannot be.
        """
        accepted = self._accepted[kind]
        sizes = {rank: math.sqrt(square) if square >= 0 else math.nan for rank, square in theirs.items()}
        mine = math.sqrt(own) if 0 <= own < math.inf else 0.0
        median = sorted(accepted)[len(accepted) // 2] if accepted else 0.0
        usual = max(median, mine)
        most = self.ratio * leeway * (math.inf if entries < _FEW else 1.0)
        for rank, size in sizes.items():
            if not size < math.inf:
                self.refused += 1
                raise Refused(rank, "it is not finite")
            if usual and size > most * usual:
                self.refused += 1
                raise Refused(rank, f"it is {size / usual:.3g} times as large as usual (world.trust_ratio)")
        accepted.extend(size for size in (mine, *sizes.values()) if size)


def squares(part: Tensor) -> Tensor:
    """Sum of the squares of a contiguous block (b,), on its device: not finite if an entry or the sum is not."""
    return torch.dot(part, part)


class Squares:
    """The mean square of a vector whose blocks are looked at one by one. every: so many-th of them are, all by
    default; a look at some is enough for what one knows to be one's own.
    """

    def __init__(self, every: int = 1) -> None:
        self._every, self._seen, self._entries = every, 0, 0
        self._sums: list[Tensor] = []

    def take(self, block: Tensor) -> None:
        """The next block (b,), contiguous."""
        if self._seen % self._every == 0:
            self._sums.append(squares(block))
            self._entries += block.numel()
        self._seen += 1

    def mean(self) -> float:
        """0 for nothing."""
        if not self._entries:
            return 0.0
        if len(self._sums) == 1:
            return float(self._sums[0]) / self._entries
        return float(torch.stack(self._sums).sum(dtype=torch.float64)) / self._entries


def mean_square(vector: Tensor) -> float:
    """Mean square of flat `vector` (n,), 0 for none; read block by block, half precision in float32."""
    found = Squares()
    for block in vector.split(BLOCK):
        if block.dtype in (torch.float16, torch.bfloat16):
            block = block.float()
        found.take(block)
    return found.mean()
