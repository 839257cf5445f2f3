"""What every codec is."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from isles.comm.codecs.kinds import KINDS, CodecKind
from isles.comm.errors import Malformed


class Codec(ABC):
    """A pure function from a flat tensor to packed bytes and back: the form of a vector on the wire.

    A codec of your own, `replicas.codec = "package.module:Class"`, derives from this class, has a `name`, and says as
    attributes of its class what it does to the entries:

        lossless      what is decoded is what was encoded, to the bit
        biased        it shrinks, or leaves out, a part of what it encodes
        shared_mask   it leaves out the same entries on all members of an exchange, and sends the others exactly

    Isles' own say so in their row of `KINDS`.
    """

    name: str
    """In messages to the user."""
    block = 1
    """Elements that share a scale: a buffer is cut only at multiples of it, so that cutting changes no bits."""

    @property
    def lossless(self) -> bool:
        """See `CodecKind`, as of the next two."""
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
        if kind is None:  # of one's own, which must say it itself: `isles.base.parts.make` asks
            raise AttributeError(f"codec {self.name}: its class does not say lossless, biased and shared_mask")
        return kind

    @property
    def back(self) -> Codec:
        """The form in which a mean of such encodings goes back to the senders: this one, unless it ruins the mean."""
        return self

    def salted(self, salt: int, member: int) -> Codec:
        """The codec of one exchange: those that draw at random draw from `salt`, the same on all members, and where
        draws are private also from the `member`'s rank.
        """
        return self

    @abstractmethod
    def wire_bytes(self, elements: int, dtype: torch.dtype) -> int:
        """Length in bytes of `encode` of a tensor with `elements` entries of `dtype`."""

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """The bytes of a vector.

        Args:
            x: (n,), floating point, on the CPU.

        Returns:
            uint8 (wire_bytes(n),), perhaps a view of x: do not write to x before it is gone.
        """

    @abstractmethod
    def decode(self, wire: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        """The vector of such bytes.

        Args:
            wire: uint8 (wire_bytes(elements),), from another worker.
            elements: n.
            dtype: of the vector.

        Returns:
            (n,), perhaps a view of wire.

        Raises:
            Malformed: for a wire of another length; see `refuse_other_length`.
        """

    def refuse_other_length(self, wire: Tensor, elements: int, dtype: torch.dtype) -> None:
        """Malformed unless `wire` is as long as `elements` entries of `dtype` make it: what `decode` begins with."""
        expected = self.wire_bytes(elements, dtype)
        if wire.numel() != expected:
            raise Malformed(-1, f"{wire.numel()} bytes for {elements} entries, which {self.name} makes {expected} of")

    def decode_into(self, wire: Tensor, out: Tensor) -> None:
        """The same, into ready memory (elements,): fresh pages cost more than the arithmetic."""
        out.copy_(self.decode(wire, len(out), out.dtype))


def as_bytes(x: Tensor) -> Tensor:
    """The memory of the contiguous tensor x as flat uint8, without a copy. ValueError if it is not contiguous."""
    if not x.is_contiguous():  # reshape would copy, and what arrives in the copy would be lost
        raise ValueError(f"a tensor of shape {tuple(x.shape)} is not contiguous: send and receive x.contiguous()")
    if x.dtype is torch.uint8 and x.dim() == 1:
        return x
    flat = x.as_strided((1,), (1,)) if x.numel() == 1 else x.view(-1)  # one entry is contiguous with any stride
    return flat.view(torch.uint8)
