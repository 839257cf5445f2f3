"""A boundary: two differentiable functions around the wire between two stages.

    sender      payload, side = encode(x, tokens)         payload travels forward, and side beside it
    receiver    x = decode(payload, side, tokens)         a leaf of the receiver's graph
    backward    the gradient of the receiver's payload travels back and enters the sender's payload

So the backward message has the payload's shape by construction, and whatever the two functions do, autograd does the
rest on both sides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Boundary(ABC):
    """The part of the stream that crosses between two stages. Shapes: B sequences of T tokens, the stream's width D;
    `tokens` (B, T+1) int64, known on both sides.

    A boundary of your own, `pipeline.boundary.kind = "package.module:Class"`, derives from this class, has no
    parameters, and is called with D and the options of [pipeline.options.boundary]. It becomes part of the model; when
    that runs in one process, `tokens` is empty.

    Args:
        width: D, numbers per token.
    """

    def __init__(self, width: int) -> None:
        self.width = width

    @abstractmethod
    def encode(self, x_BTD: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """The payload, in the stream's number format, with a gradient; and side data (uint8) without one."""

    @abstractmethod
    def decode(self, payload: Tensor, side: Tensor | None, tokens: Tensor) -> Tensor:
        """The stream (B, T, D) of a received payload."""

    @abstractmethod
    def sizes(self, sequences: int, length: int) -> tuple[tuple[int, ...], int]:
        """Shape of the payload and bytes of the side data for `sequences` sequences of `length` tokens: every length is
        known in advance, so no message needs a header.
        """


class FullStream(Boundary):
    """The stream (B, T, D) itself, unchanged."""

    def encode(self, x_BTD: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        return x_BTD, None

    def decode(self, payload: Tensor, side: Tensor | None, tokens: Tensor) -> Tensor:
        return payload

    def sizes(self, sequences: int, length: int) -> tuple[tuple[int, ...], int]:
        return (sequences, length, self.width), 0
