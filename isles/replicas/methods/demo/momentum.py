"""One worker's momentum in DeMo, and the steps that need no other worker.

    gradients -> add -> extract -> values, indices      to be sent
                        subtract                         while they travel
    everyone's values, indices -> decode -> U            phi(U) where phi works entry by entry

All by pieces that stay in cache: neither coefficients nor decoded blocks of the whole model are ever held, but for U.

phi is what DeMo makes of the decoded momentum U before the inner optimizer applies it:

sign   sign(U)
muon   U (U^T U)^(-1/2) of every matrix, by Newton-Schulz iteration; sign(U) of vectors, which have no directions

`Packing` is the message of one worker's step, of a fixed number of bytes, known from the shapes of the model:

    header    16   inner step, hash of the weights (0: not compared), int64 each
    values         all selected coefficients, group by group, in the form of a codec
    indices        group by group, where not all coefficients are selected: 1 byte each in blocks of up to 256 entries,
                   12 bits (two in three bytes) up to 4096, 2 bytes beyond; where all are selected they need none

pairs of a group = blocks * min(k, entries of a block).

`Blocks`: where each entry of a model lies in the flat momentum. `Transform`: T, of each block.

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

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from isles.base.modes import generator_of, to_device
from isles.comm.codecs import codec
from isles.comm.codecs.base import Codec
from isles.comm.codecs.scaled import Sign
from isles.comm.codecs.sparse import dct_basis, pack_indices, unpack_indices
from isles.comm.errors import Malformed
from isles.comm.group import numbers
from isles.replicas.methods.demo.config import DeMoConfig, Projection, Values

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
        draw = generator_of(f"{seed} {step} {size}")
        normal = torch.randn(size, size, generator=draw, dtype=torch.float64, device="cpu")
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


HEADER_BYTES = 16


class Bits(Codec):
    """One bit a value: decoded as +1 where it is >= 0, else -1."""

    name = "bits"

    @override
    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return -(-elements // 8)

    @override
    def encode(self, x: Tensor) -> Tensor:
        wire = torch.empty(self.wire_bytes(len(x), x.dtype), dtype=torch.uint8, device="cpu")
        Sign().pack(x, wire)
        return wire

    @override
    def decode(self, wire: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        self.refuse_other_length(wire, elements, dtype)
        out = torch.empty(8 * len(wire), dtype=torch.float32, device="cpu")
        Sign().unpack(wire, out)
        return out[:elements].to(dtype)


@dataclass(frozen=True, slots=True)
class Sent:
    """One worker's step as the others decode it. values: float32 (pairs,). indices: within their blocks,
    int64 (pairs,); those of groups that are sent whole mean nothing.
    """

    step: int
    digest: int
    values: Tensor
    indices: Tensor


class Packing:
    """The form of the messages of a model laid out in `blocks`, k coefficients of each block."""

    def __init__(self, blocks: Blocks, k: int, values: Values) -> None:
        self.per_block = [min(k, group.entries) for group in blocks.groups]
        """Coefficients kept of a block, by group."""
        self.groups = blocks.groups
        counts = [group.blocks * per_block for group, per_block in zip(self.groups, self.per_block, strict=True)]
        self.firsts = [sum(counts[:index]) for index in range(len(counts))]
        """The first pair of each group."""
        self.counts, self.pairs = counts, sum(counts)
        self.codec = Bits() if values == "sign" else codec("none" if values == "fp32" else values)
        self.exact = values in ("fp32", "sign")
        """Whether a sender subtracts what it held and not what others decode, who do not know the size of a bit."""

    @property
    def nbytes(self) -> int:
        indices = sum(_indices_bytes(group, count) for group, count in self._listed())
        return HEADER_BYTES + self.codec.wire_bytes(self.pairs, torch.float32) + indices

    @property
    def sent_whole(self) -> int:
        """Coefficients of the blocks of which all are kept."""
        return sum(count for index, count in enumerate(self.counts) if not self.is_listed(index))

    def pack(self, step: int, digest: int, values: Tensor, indices: Tensor) -> Tensor:
        """The message, uint8 (nbytes,), of CPU tensors as in `Sent`."""
        parts = [numbers(step, digest).view(torch.uint8), self.codec.encode(values)]
        for index, group in enumerate(self.groups):
            if self.is_listed(index):
                parts.append(_pack(group, indices[self._of(index)]))
        return torch.cat(parts)

    def unpack(self, wire: Tensor) -> Sent:
        """The inverse. Malformed for a message of another length, or with an index beyond the end of its block."""
        if len(wire) != self.nbytes:
            raise Malformed(-1, f"{len(wire)} bytes for a step of {self.nbytes}")
        if wire.storage_offset() % 8:  # numbers begin where numbers may
            wire = wire.clone()
        step, digest = wire[:HEADER_BYTES].view(torch.int64).tolist()
        front = HEADER_BYTES + self.codec.wire_bytes(self.pairs, torch.float32)
        values = self.codec.decode(wire[HEADER_BYTES:front], self.pairs, torch.float32)
        indices = torch.empty(self.pairs, dtype=torch.int64, device="cpu")
        for index, group in enumerate(self.groups):
            if self.is_listed(index):
                last = front + _indices_bytes(group, self.counts[index])
                own = indices[self._of(index)]
                _unpack(group, wire[front:last], own)
                if len(own) and int(own.max()) >= group.entries:
                    raise Malformed(-1, f"index {int(own.max())} in a block of {group.entries} entries")
                front = last
        return Sent(step, digest, values, indices)

    def is_listed(self, index: int) -> bool:
        """Whether the indices of a group travel: not all of its coefficients are kept."""
        return self.per_block[index] < self.groups[index].entries

    def of(self, index: int, start: int, stop: int) -> slice:
        first, per_block = self.firsts[index], self.per_block[index]
        return slice(first + start * per_block, first + stop * per_block)

    def _of(self, index: int) -> slice:
        return self.of(index, 0, self.groups[index].blocks)

    def _listed(self) -> Sequence[tuple[BlockGroup, int]]:
        return [(group, self.counts[index]) for index, group in enumerate(self.groups) if self.is_listed(index)]


def _indices_bytes(group: BlockGroup, count: int) -> int:
    if group.entries <= 256:
        return count
    return -(-count // 2) * 3 if group.entries <= 4096 else 2 * count


def _pack(group: BlockGroup, indices: Tensor) -> Tensor:
    if group.entries <= 256:
        return indices.to(torch.uint8)
    if group.entries <= 4096:
        return pack_indices(torch.nn.functional.pad(indices, (0, len(indices) % 2)))
    return indices.to(torch.int16).view(torch.uint8)  # wraps around: read back as unsigned


def _unpack(group: BlockGroup, packed: Tensor, out: Tensor) -> None:
    if group.entries <= 256:
        out.copy_(packed)
    elif group.entries <= 4096:
        out.copy_(unpack_indices(packed)[: len(out)])
    else:
        out.copy_(packed.clone().view(torch.int16)).bitwise_and_(0xFFFF)  # as above


# Coefficients and number of iterations of Jordan et al. (2024, Muon): singular values go to between 0.7 and 1.2, those
# below a thousandth of the norm to less.
_SCHULZ, _ITERATIONS = (3.4445, -4.7750, 2.0315), 5


def snapped(u_NE: Tensor, tolerance: float) -> Tensor:
    """Blocks (N, e), in place, entries below `tolerance` times their block's largest set to zero: what rounding leaves
    of zeros would make full steps under a sign.
    """
    if tolerance:
        sizes = u_NE.abs()
        u_NE.masked_fill_(sizes < tolerance * sizes.amax(dim=1, keepdim=True), 0.0)
    return u_NE


def orthogonalised(updates: Sequence[Tensor]) -> None:
    """Tensors of any shapes, in place: matrices (the last two dimensions of those that have more) to their nearest
    orthogonal ones, vectors to their signs. Equal shapes are worked on together.
    """
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for update in updates:
        by_shape.setdefault(update.shape, []).append(update)
    for shape, same in by_shape.items():
        if len(shape) < 2:
            torch._foreach_sign_(same)
        else:
            torch._foreach_copy_(same, list(_newton_schulz(torch.stack(same).float())))


def _newton_schulz(x: Tensor) -> Tensor:
    """(..., m, n) -> about U V^T of its singular value decomposition."""
    if x.shape[-2] > x.shape[-1]:
        return _newton_schulz(x.mT).mT
    a, b, c = _SCHULZ
    if not x.numel():
        return x
    tiny = torch.finfo(x.dtype).tiny
    # The largest entry first: what rounding leaves of a momentum that got no gradients is so small that its squares are
    # zero, and so would be the norm.
    x = x / x.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(tiny)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(tiny)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Momentum:
    """Of tensors of these shapes, flat and float32 on `device`; `update`: U of the last step, None before the first."""

    def __init__(self, shapes: Sequence[torch.Size], config: DeMoConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.blocks = Blocks(shapes, config.compression_chunk, config.padding)
        self.packing = Packing(self.blocks, config.compression_topk, config.value_dtype)
        self.edges = [group.edges for group in self.blocks.groups]
        self.transform: Transform = fixed(config.transform, self.edges, device)
        self.vector = torch.zeros(self.blocks.entries, device=device, dtype=torch.float32)
        self.update: Tensor | None = None
        self._inside = [self.blocks.views(self.vector, index) for index in range(len(shapes))]
        self._decoded: list[Tensor] = []  # the same views of `update`, in one list

    @property
    def bases_bytes(self) -> int:
        """Memory of the transform's bases."""
        return 0 if self.config.transform == "identity" else sum(4 * size * size for size in sizes(self.edges))

    def begin(self, step: int) -> None:
        """Decay, and draw what is drawn anew at each step."""
        self.vector.mul_(self.config.compression_decay)
        if self.config.transform == "random":
            self.transform = drawn(self.edges, self.config.seed, step, self.device)

    def add(self, gradients: Sequence[tuple[int, Tensor]], factor: float) -> None:
        """Gradients by the number of their tensor, times `factor`."""
        inside = [view for index, _ in gradients for view in self._inside[index]]
        if inside:
            cut = [part for index, gradient in gradients for part in self.blocks.cut(gradient, index)]
            torch._foreach_add_(inside, cut, alpha=factor)

    def extract(self) -> tuple[Tensor, Tensor]:
        """Values (pairs,), float32, and indices (pairs,), int64, of the largest coefficients, on `device`."""
        values = [torch.empty(0, dtype=torch.float32, device=self.device)]
        indices = [torch.empty(0, dtype=torch.int64, device=self.device)]
        for piece in self.blocks.pieces(self.device):
            group, per_block = self.blocks.groups[piece.group], self.packing.per_block[piece.group]
            coefficients = self.transform.forward(self.vector[piece.first : piece.last].view(-1, *group.edges))
            if self.packing.is_listed(piece.group):
                chosen = largest(coefficients, per_block)
                coefficients = coefficients.gather(1, chosen)
                indices.append(chosen.view(-1))
            else:
                indices.append(torch.zeros(coefficients.numel(), dtype=torch.int64, device=self.device))
            values.append(coefficients.reshape(-1))
        return torch.cat(values), torch.cat(indices)

    def subtract(self, values: Tensor, indices: Tensor) -> None:
        """Take `subtract` times what these coefficients, on `device`, stand for."""
        alpha = self.config.subtract
        if not alpha:
            return
        for piece in self.blocks.pieces(self.device):
            group, pairs = self.blocks.groups[piece.group], self.packing.of(piece.group, piece.start, piece.stop)
            part = self.vector[piece.first : piece.last].view(-1, *group.edges)
            sent = values[pairs].view(len(part), -1)
            if self.packing.is_listed(piece.group):
                sent = part.new_zeros(len(part), group.entries).scatter_(1, indices[pairs].view_as(sent), sent)
            part.sub_(self.transform.inverse(sent, group.edges), alpha=alpha)

    def decode(self, everyone: Sequence[Sent]) -> Tensor:
        """U (entries,), or its sign, from what the workers sent, added up in their order."""
        if self.update is None:
            self.update = torch.empty_like(self.vector)
            tensors = range(len(self._inside))
            self._decoded = [view for index in tensors for view in self.blocks.views(self.update, index)]
        there = to_device([part for sent in everyone for part in (sent.values, sent.indices)], self.device)
        moved = list(zip(there[::2], there[1::2], strict=True))
        for piece in self.blocks.pieces(self.device):
            group, pairs = self.blocks.groups[piece.group], self.packing.of(piece.group, piece.start, piece.stop)
            mean = self.update[piece.first : piece.last].view(-1, group.entries).zero_()
            shares = [
                (values[pairs].view(len(mean), -1), indices[pairs].view(len(mean), -1)) for values, indices in moved
            ]
            if self.packing.is_listed(piece.group):
                self._gather(mean, shares)
            else:
                for values, _ in shares:
                    mean.add_(values)
                mean.div_(len(shares))
            decoded = snapped(self.transform.inverse(mean, group.edges).view_as(mean), self.config.zero_tol)
            mean.copy_(decoded.sign_() if self.config.base == "sign" else decoded)
        return self.update

    def _gather(self, mean: Tensor, shares: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add up values at their indices, and divide by how many there are of each, or by the number of workers."""
        for values, indices in shares:
            mean.scatter_add_(1, indices, values)
        if self.config.reduce == "world":
            mean.div_(len(shares))
        elif len(shares) > 1:
            counts = torch.zeros_like(mean)
            for values, indices in shares:
                counts.scatter_add_(1, indices, torch.ones_like(values))
            mean.div_(counts.clamp_min_(1.0))

    def write(self, gradients: Sequence[Tensor]) -> None:
        """Copy U into tensors of all the shapes."""
        cut = [part for index, gradient in enumerate(gradients) for part in self.blocks.cut(gradient, index)]
        torch._foreach_copy_(cut, self._decoded)
