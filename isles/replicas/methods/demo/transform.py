"""The transform of DeMo's blocks, and which coefficients of each are the largest.

    T(B) = C_a^T B C_b       T^-1(X) = C_a X C_b^T        C_n: orthogonal (n, n)

dct: C_n is the orthonormal DCT-II. random: drawn anew at each step from (seed, step, n), the same on all workers.
identity: nothing is done. All in float32: in bfloat16 there and back again is off by half a per cent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from isles.comm.codecs.topk import dct_basis
from isles.replicas.methods.demo.config import Projection

_WAYS = 8  # parts of a row that are compared first, see `largest`


class Transform:
    """With the bases of block edges by their size; without any: the identity."""

    def __init__(self, bases: dict[int, Tensor]) -> None:
        self.bases = bases

    def forward(self, x_NAB: Tensor) -> Tensor:
        """Blocks (N, a, b) -> coefficients (N, a b)."""
        return self._both(x_NAB, inverse=False).view(len(x_NAB), -1)

    def inverse(self, c_NE: Tensor, edges: tuple[int, int]) -> Tensor:
        """Coefficients (N, a b) -> blocks (N, a, b); may be the same memory."""
        return self._both(c_NE.view(-1, *edges), inverse=True)

    def _both(self, x_NAB: Tensor, inverse: bool) -> Tensor:
        """One product of all rows at once, then one of each block."""
        a, b = x_NAB.shape[1:]
        if b in self.bases:
            right = self.bases[b].t() if inverse else self.bases[b]
            x_NAB = (x_NAB.reshape(-1, b) @ right).view(x_NAB.shape)
        if a in self.bases:
            left = self.bases[a] if inverse else self.bases[a].t()
            x_NAB = left @ x_NAB
        return x_NAB


def fixed(kind: Projection, edges: Iterable[tuple[int, int]], device: torch.device) -> Transform:
    """The transform of every step; for "random", whose bases are drawn at each, the identity."""
    return Transform({size: dct_basis(size).to(device) for size in sizes(edges)} if kind == "dct" else {})


def drawn(edges: Iterable[tuple[int, int]], seed: int, step: int, device: torch.device) -> Transform:
    """Random orthogonal bases of inner step `step`: the factor Q of a normal matrix, uniform up to signs."""
    bases = {}
    for size in sizes(edges):
        salt = hashlib.sha256(f"{seed} {step} {size}".encode()).digest()[:4]
        generator = torch.Generator().manual_seed(int.from_bytes(salt, "little"))
        normal = torch.randn(size, size, generator=generator, dtype=torch.float64, device="cpu")
        bases[size] = torch.linalg.qr(normal).Q.to(device, torch.float32)
    return Transform(bases)


def sizes(edges: Iterable[tuple[int, int]]) -> list[int]:
    """Of the bases that blocks of these edges want."""
    return sorted({size for pair in edges for size in pair if size > 1})


def largest(c_NE: Tensor, k: int) -> Tensor:
    """Places (N, k), int64, of the k entries largest in size of each row, in any order.

    The k largest are in the k columns (of a row seen as _WAYS lines) with the largest maxima: only those are sorted
    out, which is up to three times as fast as one pass over all.
    """
    rows, entries = c_NE.shape
    magnitudes = c_NE.abs()
    columns = entries // _WAYS
    if entries % _WAYS or 2 * k > columns:
        return magnitudes.topk(k, dim=1, sorted=False).indices
    lines = magnitudes.view(rows, _WAYS, columns)
    chosen = lines.amax(dim=1).topk(k, dim=1, sorted=False).indices
    few = lines.gather(2, chosen[:, None].expand(rows, _WAYS, k)).view(rows, -1)
    found = few.topk(k, dim=1, sorted=False).indices
    return found // k * columns + chosen.gather(1, found % k)
