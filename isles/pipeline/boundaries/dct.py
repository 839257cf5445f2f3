"""DCT-MP (arXiv 2010.08899): of each token's stream the entries of largest size, the same ones both ways.

    K = max(1, ceil((1 - sparsity) D))
    forward     the K entries of largest |x|, and which they are (1 byte each where D <= 256, else 2)
    backward    the gradient of those K alone, in the same order: both sides know which

The receiver goes on with x * mask, and the sender with gradient * mask: the derivative of masking with the mask held
fixed. The mask is part of the function that is trained, so judging and generating keep it.

Deviation: K entries exactly, ties by torch's `topk`, so that every length is known beforehand.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from isles.comm.codecs.base import as_bytes
from isles.comm.errors import Malformed
from isles.pipeline.boundaries.base import Boundary
from isles.pipeline.boundaries.names import place_size


class LargestEntries(Boundary):
    """The `kept` largest entries of each token's stream of `width`."""

    def __init__(self, width: int, kept: int) -> None:
        self.width, self.kept = width, kept
        self.places_dtype = torch.uint8 if place_size(width) == 1 else torch.uint16

    def encode(self, x_BTD: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        places_BTK = largest(x_BTD, self.kept)
        return x_BTD.gather(-1, places_BTK), as_bytes(places_BTK.to(self.places_dtype).contiguous())

    def decode(self, payload: Tensor, side: Tensor | None, tokens: Tensor) -> Tensor:
        assert side is not None
        places_BTK = side.clone().view(self.places_dtype).to(torch.int64).view(payload.shape)
        if int(places_BTK.max()) >= self.width:
            raise Malformed(-1, f"an entry {int(places_BTK.max())} of a stream of {self.width}")
        return payload.new_zeros(*payload.shape[:-1], self.width).scatter(-1, places_BTK, payload)

    def sizes(self, sequences: int, length: int) -> tuple[tuple[int, ...], int]:
        shape = (sequences, length, self.kept)
        return shape, math.prod(shape) * self.places_dtype.itemsize


def largest(x_BTD: Tensor, kept: int) -> Tensor:
    """Places (B, T, K) of the entries of largest size, rising."""
    return x_BTD.detach().abs().topk(kept, dim=-1).indices.sort(dim=-1).values
