"""DeMo's blocks (where each entry of a model lies in the flat momentum), their transform, and which coefficients of
each block are the largest.

    tensor (..., n1, n2)  ->  blocks (a, b), a and b at most `chunk`; leading dimensions only add blocks
    vector (n,)           ->  blocks (1, b)
    blocks of one shape (a, b), of all tensors, lie next to each other: a group, (blocks, a, b) without a copy

    T(B) = C_a^T B C_b       T^-1(X) = C_a X C_b^T        C_n: orthogonal (n, n)

dct: C_n is the orthonormal DCT-II. random: drawn anew at each step from (seed, step, n), the same on all workers.
identity: nothing is done. All in float32: in bfloat16 there and back again is off by half a per cent.

An edge is the largest divisor of its dimension up to `chunk`, as in the authors' code. Where that is less than half of
`chunk` (257 rows have only 1), the dimension is filled up with zeros: as few blocks as `chunk` allows, all of one edge.
So a tensor is one strided view of its blocks, or up to four where its last blocks are filled up.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isles.comm.codecs.sparse import dct_basis
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
    strips = magnitudes.view(rows, _WAYS, columns)
    chosen = strips.amax(dim=1).topk(k, dim=1, sorted=False).indices
    few = strips.gather(2, chosen[:, None].expand(rows, _WAYS, k)).view(rows, -1)
    found = few.topk(k, dim=1, sorted=False).indices
    return found // k * columns + chosen.gather(1, found % k)


_PIECE = 1 << 18  # entries worked on at a time on the CPU: with what is made of them they stay in cache
_PIECE_ELSEWHERE = 1 << 26  # a GPU wants few large calls


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """`blocks` blocks of shape (a, b), from entry `first` of the flat vector on."""

    edges: tuple[int, int]
    first: int
    blocks: int

    @property
    def entries(self) -> int:
        return self.edges[0] * self.edges[1]


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks [start, stop) of group number `group`; their entries are [first, last) of the flat vector."""

    group: int
    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class _BlockLayout:
    """A tensor's blocks: lead (..., rows, columns) of them, of `edges`, from entry `first` on."""

    grid: tuple[int, ...]
    edges: tuple[int, int]
    first: int


class Blocks:
    """The layout of tensors of these shapes; `entries` in all, zeros that fill up included."""

    def __init__(self, shapes: Sequence[torch.Size], chunk: int, padding: bool) -> None:
        self.shapes = [_at_least_2d(shape) for shape in shapes]
        cut = [tuple(edge(size, chunk, padding) for size in shape[-2:]) for shape in self.shapes]
        grids = [
            (*shape[:-2], *(-(-size // one) for size, one in zip(shape[-2:], edges, strict=True)))
            for shape, edges in zip(self.shapes, cut, strict=True)
        ]
        self.groups: list[BlockGroup] = []
        self._indices: dict[int, _BlockLayout] = {}
        first = 0
        for edges in dict.fromkeys((a, b) for a, b in cut):
            start = first
            for index, grid in enumerate(grids):
                if cut[index] == edges:
                    self._indices[index] = _BlockLayout(grid, edges, first)
                    first += math.prod(grid) * math.prod(edges)
            self.groups.append(BlockGroup(edges, start, (first - start) // math.prod(edges)))
        self.entries = first

    def views(self, flat: Tensor, index: int) -> list[Tensor]:
        """Tensor `index` inside a flat vector (entries,): views with the shapes of `cut` of it."""
        grid, shape = self._indices[index], self.shapes[index]
        (a, b), count = grid.edges, math.prod(grid.grid) * math.prod(grid.edges)
        whole = flat[grid.first : grid.first + count].view(*grid.grid, a, b).transpose(-3, -2)
        return [
            whole[..., rows.first : rows.first + rows.blocks, : rows.height, :, :][
                ..., columns.first : columns.first + columns.blocks, : columns.height
            ]
            for rows in _runs(shape[-2], a)
            for columns in _runs(shape[-1], b)
        ]

    def cut(self, tensor: Tensor, index: int) -> list[Tensor]:
        """A tensor of shape `index`, seen by blocks: (..., block rows, rows, block columns, columns) each."""
        grid, shape = self._indices[index], self.shapes[index]
        lead = shape[:-2]
        whole = tensor if tensor.dim() >= 2 else tensor.view(shape)
        return [
            whole[..., rows.start : rows.stop, columns.start : columns.stop].view(
                *lead, rows.blocks, rows.height, columns.blocks, columns.height
            )
            for rows in _runs(shape[-2], grid.edges[0])
            for columns in _runs(shape[-1], grid.edges[1])
        ]

    def thin(self, chunk: int) -> list[int]:
        """Dimensions above `chunk` whose blocks have less than half of it: what padding mends."""
        both = [zip(shape[-2:], self._indices[i].edges, strict=True) for i, shape in enumerate(self.shapes)]
        return sorted({size for pairs in both for size, one in pairs if size > chunk and 2 * one < chunk})

    def pieces(self, device: torch.device) -> Iterator[BlockRange]:
        """All blocks in order, so many at a time as suits the device."""
        room = _PIECE if device.type == "cpu" else _PIECE_ELSEWHERE
        for number, group in enumerate(self.groups):
            many = max(room // group.entries, 1)
            for start in range(0, group.blocks, many):
                stop = min(start + many, group.blocks)
                first, last = (group.first + at * group.entries for at in (start, stop))
                yield BlockRange(number, start, stop, first, last)


@dataclass(frozen=True, slots=True)
class _Extent:
    """Entries [start, stop) of a dimension: `blocks` blocks from block `first` on, of which `height` is real."""

    start: int
    stop: int
    first: int
    blocks: int
    height: int


def edge(size: int, chunk: int, padding: bool) -> int:
    """The edge of a dimension's blocks, see the module."""
    divisor = max((one for one in range(1, min(size, chunk) + 1) if size % one == 0), default=1)
    if size <= chunk or not padding or 2 * divisor >= chunk:
        return divisor
    return -(-size // -(-size // chunk))


def _runs(size: int, height: int) -> list[_Extent]:
    """The whole blocks of a dimension, and the last one where it is filled up."""
    whole, rest = divmod(size, height)
    runs = [_Extent(0, whole * height, 0, whole, height)] if whole else []
    return [*runs, _Extent(whole * height, size, whole, 1, rest)] if rest else runs


def _at_least_2d(shape: torch.Size) -> torch.Size:
    return torch.Size((*(1,) * (2 - len(shape)), *shape))
