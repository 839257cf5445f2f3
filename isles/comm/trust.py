"""Checks that a peer's payload is a plausible share of this round: finite, and not much larger than earlier shares.

    accepted    every |x_i| finite,  rms(x) <= ratio * max(median, own)

median: of the newest 101 accepted shares of the same kind, this worker's own included. own: this worker's share of this
round. With it, growth that all workers have in common passes, as that of outer gradients during warmup. The check
compares root mean squares instead of norms, because shards differ in length. It ignores shares of zeros.

This detects garbage, not deliberate falsification: a peer within the ratio can still shift a mean as it likes.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping

import torch
from torch import Tensor

from isles.comm.errors import Refused

BLOCK = 1 << 17  # entries that stay in cache between this check and their next use
_REMEMBERED = 101
_FEW = 256  # shorter shares need only be finite: all of a few entries may happen to be near zero
_SOME = 16
CHECKED = ("outer", "inner", "pipeline")
"""Channels whose payloads are checked; those of users' own exchanges are not."""


JUMPS = 100.0
"""Extra factor on `world.trust_ratio` for gradients of single steps and for messages between stages: one bad batch can
make these jump.
"""


class PeerTrust:
    """The sizes of payloads that one worker has accepted. ratio: see the module; inf: payloads need only be finite."""

    def __init__(self, ratio: float = 10.0) -> None:
        self.ratio = ratio
        self.refused = 0
        """Number of refused payloads."""
        self._accepted: defaultdict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    def own_every(self, kind: Hashable) -> int:
        """Check one block in this many of this worker's own share. Before any share of the kind was accepted, it checks
        all blocks; later a sample is enough to see whether all shares have grown.
        """
        return _SOME if self._accepted[kind] else 1

    def check(self, kind: Hashable, theirs: Mapping[int, float], own: float, entries: int, leeway: float = 1.0) -> None:
        """Accept shares of one kind, or raise Refused for the first implausible one.

        theirs: mean squares of peers' shares by rank. own: mean square of this worker's share; 0: it has none. entries:
        length of a share. leeway: factor on `ratio`.
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
    """Sum of the squares of a contiguous block (b,), on its device. Not finite if an entry or the sum is not finite."""
    return torch.dot(part, part)


class Squares:
    """The mean square of a vector, block by block. every: use one block in this many (default: all); a sample is enough
    for the worker's own share.
    """

    def __init__(self, every: int = 1) -> None:
        self._every, self._seen, self._entries = every, 0, 0
        self._sums: list[Tensor] = []

    def take(self, block: Tensor) -> None:
        """Add the next block (b,), contiguous."""
        if self._seen % self._every == 0:
            self._sums.append(squares(block))
            self._entries += block.numel()
        self._seen += 1

    def mean(self) -> float:
        """The mean square; 0 without blocks."""
        if not self._entries:
            return 0.0
        if len(self._sums) == 1:
            return float(self._sums[0]) / self._entries
        return float(torch.stack(self._sums).sum(dtype=torch.float64)) / self._entries


def mean_square(vector: Tensor) -> float:
    """Mean square of flat `vector` (n,), 0 if it is empty. Reads block by block; half precision in float32."""
    total = Squares()
    for block in vector.split(BLOCK):
        if block.dtype in (torch.float16, torch.bfloat16):
            block = block.float()
        total.take(block)
    return total.mean()
