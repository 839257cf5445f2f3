"""A random part of the entries, the same on all members, without their places: drawn anew in each exchange.

Within each chunk of 4096 a fraction f is kept, in its own precision; the rest decodes to zero. A mean of such encodings
is exact on what was kept (the shared mask of SPARTA, and the first stage of CocktailSGD). All chunks of an exchange
share one draw, so that cutting a vector changes nothing. bits per entry = 32 f.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from isles.comm.codecs.base import Codec, as_bytes
from isles.comm.codecs.kinds import CHUNK


class RandomK(Codec):
    """fraction: of the entries, in (0, 1]. salt: what the draw depends on."""

    block = CHUNK

    def __init__(self, fraction: float, salt: int = 0) -> None:
        self.fraction, self.salt = fraction, salt
        self.kept = max(round(fraction * CHUNK), 1)
        self.name = f"randk:{fraction:g}"

    @override
    def salted(self, salt: int, member: int) -> Codec:
        return RandomK(self.fraction, salt)

    @override
    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return self.kept * -(-elements // CHUNK) * dtype.itemsize

    @override
    def encode(self, x: Tensor) -> Tensor:
        x_CB = torch.nn.functional.pad(x, (0, -x.numel() % CHUNK)).view(-1, CHUNK)
        return as_bytes(x_CB.gather(1, self._places(len(x_CB))))

    @override
    def decode(self, wire: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        self.refuse_other_length(wire, elements, dtype)
        chunks = -(-elements // CHUNK)
        out_CB = torch.zeros(chunks, CHUNK, dtype=dtype, device="cpu")
        out_CB.scatter_(1, self._places(chunks), wire.view(dtype).view(chunks, self.kept))
        return out_CB.view(-1)[:elements]

    def mask(self, elements: int) -> Tensor:
        """What is kept of a flat tensor, bool (elements,)."""
        chunks = -(-elements // CHUNK)
        mask_CB = torch.zeros(chunks, CHUNK, dtype=torch.bool, device="cpu").scatter_(1, self._places(chunks), True)
        return mask_CB.view(-1)[:elements]

    def _places(self, chunks: int) -> Tensor:
        """(chunks, kept)."""
        draw = torch.Generator().manual_seed(self.salt)
        return torch.randperm(CHUNK, generator=draw, dtype=torch.int64, device="cpu")[: self.kept].expand(chunks, -1)
