"""How flat vectors of one layout become their group's mean, round after round: entry by entry through a codec (here),
or as low-rank factors (`factors`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from isles.comm.call import Call
from isles.comm.codecs.base import Codec
from isles.comm.collectives.headers import Stamp
from isles.comm.collectives.mean import as_decoded, mean, pattern, working_bytes
from isles.comm.transport import Steps
from isles.network.exchange_plan import MessagePattern


class Averaging(ABC):
    """Means of flat vectors (n,) of one layout. Rounds are counted from 1. No two means of one object overlap."""

    held_bytes = 0
    """Memory of what is kept from round to round."""
    preserves_signs = False
    """Whether the mean of zeros has the sign that all of them had."""
    starting = 0
    """Rounds at the beginning that travel otherwise than the later ones."""

    @abstractmethod
    def pattern(self, round: int, size: int) -> MessagePattern:
        """What one mean in a group of `size` puts on the wire."""

    def sent_bytes(self, round: int, size: int, position: int) -> int:
        """Bytes that `position` of a group of `size` hands to the transport for one mean, headers included."""
        return int(self.pattern(round, size).sent(position, size))

    @abstractmethod
    def working_bytes(self, size: int) -> int:
        """Memory that one mean takes at its peak, beyond the vector."""

    @abstractmethod
    def mean(
        self, call: Call, buffer: Tensor, stamp: Stamp, own: Tensor | None, residual: Tensor | None, part: int
    ) -> Steps[tuple[int, ...]]:
        """Put the mean of the members of use into `buffer`. Arguments and result: those of `mean`."""

    @abstractmethod
    def share(self, buffer: Tensor, round: int, fragment: int, member: int, out: Tensor) -> None:
        """Fill `out` (n,) with what the others will make of rank `member`'s `buffer`, before it is sent."""

    def state_dict(self) -> dict[str, Any]:
        """What is kept from round to round."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        assert not state


class Coded(Averaging):
    """Each entry for itself, as `codec` leaves it."""

    def __init__(self, codec: Codec, elements: int, dtype: torch.dtype) -> None:
        self.codec, self.elements, self.dtype = codec, elements, dtype
        self.preserves_signs = codec.lossless

    @override
    def pattern(self, round: int, size: int) -> MessagePattern:
        return pattern(self.elements, self.dtype, self.codec, size)

    @override
    def working_bytes(self, size: int) -> int:
        return working_bytes(self.elements, self.dtype, self.codec, size)

    @override
    def mean(
        self, call: Call, buffer: Tensor, stamp: Stamp, own: Tensor | None, residual: Tensor | None, part: int
    ) -> Steps[tuple[int, ...]]:
        return mean(call, buffer, self.codec, stamp, own, residual, part)

    @override
    def share(self, buffer: Tensor, round: int, fragment: int, member: int, out: Tensor) -> None:
        as_decoded(buffer, self.codec, round, fragment, member, out)
