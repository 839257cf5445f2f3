"""What the owner of a shard says in the place of its mean when a share of it is refused, so that all end with the one
error that names who sent it.

A wire of ones is no number in any form, so whoever reads it as a mean refuses it and looks then whether it is a
verdict: the right way costs nothing. In its middle stands whose share it was:

    ones ... | rank, its complement (4 bytes each) | ... ones        not told in wires below 24 bytes
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

_NAME = struct.Struct("<iI")
_LEAST = 24  # bytes: a scale in front and one behind stay ones


def verdict(ranks: Sequence[int], culprit: int, nbytes: int) -> Tensor:
    """The wire (nbytes,) uint8 that tells whose share was refused: a rank of the group, or -1."""
    wire = torch.full((nbytes,), 0xFF, dtype=torch.uint8)
    if nbytes >= _LEAST and culprit in ranks:
        name = bytearray(_NAME.pack(culprit, ~culprit & 0xFFFFFFFF))
        begin = _middle(nbytes)
        wire[begin : begin + _NAME.size] = torch.frombuffer(name, dtype=torch.uint8)
    return wire


def condemned(wire: Tensor, ranks: Sequence[int]) -> int | None:
    """The rank that `wire` names if it is a verdict (-1: nobody of the group); else None."""
    begin, rest = _middle(wire.numel()), wire
    culprit = -1
    if wire.numel() >= _LEAST:
        named, check = _NAME.unpack(wire[begin : begin + _NAME.size].numpy().tobytes())
        if named in ranks and check == ~named & 0xFFFFFFFF:
            culprit = named
            rest = torch.cat((wire[:begin], wire[begin + _NAME.size :]))
    return culprit if bool((rest == 0xFF).all()) else None


def _middle(nbytes: int) -> int:
    return nbytes // 2 - _NAME.size // 2
