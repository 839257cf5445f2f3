"""The interface of codecs."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from isles.comm.codecs.kinds import KINDS, CodecKind
from isles.comm.errors import Malformed


class Codec(ABC):
    """A pure function from a flat tensor to packed bytes and back: the form of a vector on the wire.

    Your own codec, `replicas.codec = "package.module:Class"`, derives from this class. It has a `name`, and three class
    attributes that describe what it does to the entries:

        lossless      decoding returns the encoded vector, bit for bit
        biased        the codec shrinks or drops part of the vector
        shared_mask   all members of an exchange drop the same entries, and send the others exactly

    For the codecs of Isles, the row in `KINDS` holds these attributes.
    """

    name: str
    """The codec's name in messages to the user."""
    block = 1
    """Elements that share a scale. A buffer is split only at multiples of this, so that splitting changes no bits."""

    @property
    def lossless(self) -> bool:
        """See `CodecKind`, which also describes `biased` and `shared_mask`."""
        return self._kind.lossless

    @property
    def biased(self) -> bool:
        return self._kind.biased

    @property
    def shared_mask(self) -> bool:
        return self._kind.shared_mask

    @property
    def _kind(self) -> CodecKind:
        kind = KINDS.get(self.name.partition(":")[0])
        if kind is None:  # a user's class must define the attributes itself; `isles.base.parts.make` checks them
            raise AttributeError(f"codec {self.name}: its class does not say lossless, biased and shared_mask")
        return kind

    @property
    def back(self) -> Codec:
        """The codec that returns the mean to the senders: this one, unless its error would be too large for a mean."""
        return self

    def salted(self, salt: int, member: int) -> Codec:
        """Return the codec for one exchange. Random codecs derive their draws from `salt`, which all members share;
        codecs with private draws also use the `member`'s rank.
        """
        return self

    @abstractmethod
    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Length in bytes of `encode` of a tensor with `elements` entries of `dtype`."""

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Encode a vector.

        Args:
            x: (n,), floating point, on the CPU.

        Returns:
            uint8 (wire_bytes(n),). It may be a view of x: do not write to x while the result is in use.
        """

    @abstractmethod
    def decode(self, wire: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        """Decode a vector.

        Args:
            wire: uint8 (wire_bytes(elements),), received from another worker.
            elements: n, the length of the vector.
            dtype: the format of the vector.

        Returns:
            (n,). It may be a view of wire.

        Raises:
            Malformed: if `wire` has another length; see `refuse_other_length`.
        """

    def refuse_other_length(self, wire: Tensor, elements: int, dtype: torch.dtype) -> None:
        """Raise Malformed unless `wire` has the length for `elements` entries of `dtype`. `decode` begins with it."""
        expected = self.wire_bytes(elements, dtype)
        if wire.numel() != expected:
            raise Malformed(-1, f"{wire.numel()} bytes for {elements} entries, which {self.name} makes {expected} of")

    def decode_into(self, wire: Tensor, out: Tensor) -> None:
        """Decode into existing memory `out` (elements,): allocating pages costs more than the arithmetic."""
        out.copy_(self.decode(wire, len(out), out.dtype))


def as_bytes(x: Tensor) -> Tensor:
    """View the contiguous tensor x as flat uint8, without a copy. ValueError if it is not contiguous."""
    if not x.is_contiguous():  # reshape would copy, and data received into the copy would be lost
        raise ValueError(f"a tensor of shape {tuple(x.shape)} is not contiguous: send and receive x.contiguous()")
    if x.dtype is torch.uint8 and x.dim() == 1:
        return x
    flat = x.as_strided((1,), (1,)) if x.numel() == 1 else x.view(-1)  # one entry is contiguous with any stride
    return flat.view(torch.uint8)
