"""Codecs that send some of the entries, and the packing of indices.

topk sends the k largest entries of every chunk of 4096, with their indices (Sparse communication, Aji and Heafield
2017). Wire: the values of all chunks, encoded by another codec; then their indices, 12 bits each, two in three bytes.
bits per entry = k/4096 (12 + bits of a value). All other entries decode to zero: biased, train with error feedback.
Zeros fill a shorter last chunk.

dct_topk sends the largest coefficients of each chunk's two-dimensional discrete cosine transform (DCT-II, orthonormal)
instead, with the chunk viewed as 64 x 64. (DeMo, arXiv 2411.19870, transforms blocks of matrices; a chunk of 4096
neighbours in memory is such a block if rows have 64 entries.)

randk sends a random fraction f of each chunk, without indices and in the vector's precision. All members draw the same
entries, new ones in each exchange; other entries decode to zero. A mean of such encodings is exact on the entries sent
(the shared mask of SPARTA, and the first stage of CocktailSGD). All chunks of an exchange share one draw, so that
splitting a vector changes nothing. bits per entry = 32 f.

`pack` and `unpack` convert ascending indices to bytes and back, in one of three forms. The message also has the form
and the count:

    indices   4 bytes per index
    blocks    2 bytes per index, relative to its block of 65,536 entries; 4 bytes per block for its number of indices
    bitmap    1 bit per entry: sent or not
"""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from isles.comm.codecs.base import Codec, as_bytes
from isles.comm.codecs.kinds import CHUNK
from isles.comm.codecs.scaled import BFloat16, Identity
from isles.comm.errors import Malformed


class TopK(Codec):
    """The k largest entries of each chunk. k: even. values: codec of their values."""

    kind = "topk"
    block = CHUNK

    def __init__(self, k: int, values: Codec | None = None) -> None:
        self.k, self.values = k, values or BFloat16()
        self.name = f"{self.kind}:{k}" + ("" if values is None else f"+{values.name}")

    @property
    @override
    def back(self) -> Codec:
        """Dense: the mean of several members has several times as many nonzero entries."""
        return Identity()

    @override
    def salted(self, salt: int, member: int) -> Codec:
        """Salt the codec of the values: each member rounds them independently in every exchange."""
        values = self.values.salted(salt, member)
        if values is self.values:
            return self
        codec = copy.copy(self)
        codec.values = values
        return codec

    @override
    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        sent = self.k * -(-elements // CHUNK)
        return sent // 2 * 3 + self.values.wire_bytes(sent, torch.float32)

    @override
    def encode(self, x: Tensor) -> Tensor:
        x_CB = self.transform(_chunks(x))
        indices = x_CB.abs().topk(self.k, dim=1, sorted=False).indices
        return torch.cat((self.values.encode(x_CB.gather(1, indices).view(-1)), pack_indices(indices.view(-1))))

    @override
    def decode(self, wire: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        self.refuse_other_length(wire, elements, dtype)
        chunks = -(-elements // CHUNK)
        sent = self.k * chunks
        front = self.values.wire_bytes(sent, torch.float32)
        values = self.values.decode(wire[:front], sent, torch.float32).view(chunks, self.k)
        indices = unpack_indices(wire[front:]).view(chunks, self.k)
        out_CB = torch.zeros(chunks, CHUNK, dtype=torch.float32, device="cpu").scatter_(1, indices, values)
        return self.restore(out_CB).reshape(-1)[:elements].to(dtype)

    def transform(self, x_CB: Tensor) -> Tensor:
        """Return the coefficients of the chunks, of which the largest are sent."""
        return x_CB

    def restore(self, y_CB: Tensor) -> Tensor:
        return y_CB


class DCTTopK(TopK):
    """The k largest DCT coefficients of each chunk, viewed as 64 x 64."""

    kind = "dct_topk"

    def __init__(self, k: int, values: Codec | None = None) -> None:
        super().__init__(k, values)
        self._basis = dct_basis(math.isqrt(CHUNK))

    @override
    def transform(self, x_CB: Tensor) -> Tensor:
        side = len(self._basis)
        return (self._basis.t() @ x_CB.view(-1, side, side) @ self._basis).view(-1, CHUNK)

    @override
    def restore(self, y_CB: Tensor) -> Tensor:
        side = len(self._basis)
        return (self._basis @ y_CB.view(-1, side, side) @ self._basis.t()).view(-1, CHUNK)


def dct_basis(n: int) -> Tensor:
    """C (n, n), C[m, q] = sqrt(2/n) cos(pi (2 m + 1) q / 2 n), the first column over sqrt 2: C C^T = 1."""
    q = torch.arange(n, dtype=torch.float64, device="cpu")
    m = q[:, None]
    basis = math.sqrt(2 / n) * torch.cos(math.pi * (2 * m + 1) * q / (2 * n))
    basis[:, 0] /= math.sqrt(2)
    return basis.to(torch.float32)


def pack_indices(indices: Tensor) -> Tensor:
    """Pack integers 0..4095 (2 n,) into uint8 (3 n,), each pair in three bytes, low bits first."""
    first, second = indices.to(torch.int32).view(-1, 2).unbind(1)
    return torch.stack((first & 255, first >> 8 | (second & 15) << 4, second >> 4), 1).to(torch.uint8).view(-1)


def unpack_indices(packed: Tensor) -> Tensor:
    """The inverse of `pack_indices`, int64 (2 n,)."""
    low, middle, high = packed.to(torch.int64).view(-1, 3).unbind(1)
    return torch.stack((low | (middle & 15) << 8, middle >> 4 | high << 4), 1).view(-1)


def _chunks(x: Tensor) -> Tensor:
    """Flat (n,) to float32 (ceil(n/4096), 4096), padded with zeros."""
    return torch.nn.functional.pad(x.to(torch.float32), (0, -x.numel() % CHUNK)).view(-1, CHUNK)


class RandomK(Codec):
    """A random fraction of each chunk. fraction: in (0, 1]. salt: seed of the draw."""

    block = CHUNK

    def __init__(self, fraction: float, salt: int = 0) -> None:
        self.fraction, self.salt = fraction, salt
        self.sent = max(round(fraction * CHUNK), 1)
        self.name = f"randk:{fraction:g}"

    @override
    def salted(self, salt: int, member: int) -> Codec:
        return RandomK(self.fraction, salt)

    @override
    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return self.sent * -(-elements // CHUNK) * dtype.itemsize

    @override
    def encode(self, x: Tensor) -> Tensor:
        x_CB = torch.nn.functional.pad(x, (0, -x.numel() % CHUNK)).view(-1, CHUNK)
        return as_bytes(x_CB.gather(1, self._indices(len(x_CB))))

    @override
    def decode(self, wire: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        self.refuse_other_length(wire, elements, dtype)
        chunks = -(-elements // CHUNK)
        out_CB = torch.zeros(chunks, CHUNK, dtype=dtype, device="cpu")
        out_CB.scatter_(1, self._indices(chunks), wire.view(dtype).view(chunks, self.sent))
        return out_CB.view(-1)[:elements]

    def mask(self, elements: int) -> Tensor:
        """The mask of the entries of a flat tensor that are sent, bool (elements,)."""
        chunks = -(-elements // CHUNK)
        mask_CB = torch.zeros(chunks, CHUNK, dtype=torch.bool, device="cpu").scatter_(1, self._indices(chunks), True)
        return mask_CB.view(-1)[:elements]

    def _indices(self, chunks: int) -> Tensor:
        draw = torch.Generator().manual_seed(self.salt)
        return torch.randperm(CHUNK, generator=draw, dtype=torch.int64, device="cpu")[: self.sent].expand(chunks, -1)


FORMS = ("blocks", "indices", "bitmap")
_BLOCK = 1 << 16


def indices_bytes(form: str, count: int, elements: int) -> int:
    """Length in bytes of `count` indices among `elements` entries."""
    if form == "bitmap":
        return -(-elements // 8)
    return 4 * count if form == "indices" else 2 * count + 4 * -(-elements // _BLOCK)


def smallest(count: int, elements: int) -> str:
    """The form that takes the fewest bytes."""
    return min(FORMS, key=lambda form: indices_bytes(form, count, elements))


def pack(form: str, indices: Tensor, elements: int) -> Tensor:
    """Pack int64 indices (c,) among `elements` entries into uint8 (indices_bytes(form, c, elements),)."""
    array = indices.numpy()
    if form == "indices":
        packed = array.astype(np.uint32).view(np.uint8)
    elif form == "blocks":
        counts = np.bincount(array >> 16, minlength=-(-elements // _BLOCK)).astype(np.uint32)
        packed = np.concatenate((counts.view(np.uint8), (array & _BLOCK - 1).astype(np.uint16).view(np.uint8)))
    else:
        mask = np.zeros(elements, dtype=np.bool_)
        mask[array] = True
        packed = np.packbits(mask, bitorder="little")
    return torch.from_numpy(packed)


def unpack(form: str, packed: Tensor, elements: int) -> Tensor:
    """The inverse of `pack`, int64 (c,). Malformed if the message is invalid or an index is not below `elements`."""
    array = packed.numpy()
    if form == "indices":
        indices = array.copy().view(np.uint32).astype(np.int64)  # the copy is aligned
    elif form == "blocks":
        front = 4 * -(-elements // _BLOCK)
        counts, low = array[:front].copy().view(np.uint32), array[front:].copy().view(np.uint16)
        if counts.sum() != len(low):
            raise Malformed(-1, f"the message announces {counts.sum()} indices but has {len(low)}")
        indices = low + np.repeat(np.arange(len(counts), dtype=np.int64) << 16, counts)
    else:
        indices = np.flatnonzero(np.unpackbits(array, count=elements, bitorder="little"))
    if len(indices) and indices.max() >= elements:
        raise Malformed(-1, f"index {indices.max()} of {elements}")
    return torch.from_numpy(indices)
