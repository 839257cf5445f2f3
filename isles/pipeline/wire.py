"""What one message between stages holds, how long it is, and its address.

    F, L    [payload | side | ids]     ids: the microbatch's tokens (B, T+1), or the last columns of other rows of
                                       integers, 1, 2 or 4 bytes each; not on the way home
    B       [gradient of the payload | loss]

Payload and gradient each go through a codec of their own, straight through: the backward pass is that of the payload as
it was before.

A message bears the task that begins with it. Both ends know every length beforehand, so there is no header.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from isles.comm.codecs.base import Codec, as_bytes
from isles.comm.codecs.casts import Identity
from isles.network.routing.routes import MOST_VISITS, Route, Task
from isles.pipeline.boundaries.base import Boundary
from isles.staging import to_device, to_host
from isles.wrapping import host_work

_KINDS = {"F": 0, "L": 1, "B": 2}
_IDS = ((1 << 8, torch.uint8), (1 << 15, torch.int16), (1 << 31, torch.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageForm:
    """Messages about `sequences` of `length` tokens of `vocab` ids each, whose stream is in `dtype`. codec: of what
    `boundary` makes of the stream; gradient_codec: of its gradient. columns: of a row of integers, the last, that go
    along; None: all of a sequence, length + 1.
    """

    sequences: int
    length: int
    vocab: int
    dtype: torch.dtype
    boundary: Boundary
    codec: Codec = field(default_factory=Identity)
    gradient_codec: Codec = field(default_factory=Identity)
    columns: int | None = None

    @property
    def payload_shape(self) -> tuple[int, ...]:
        """Of what the boundary makes of the stream."""
        return self.boundary.sizes(self.sequences, self.length)[0]

    @property
    def ids_shape(self) -> tuple[int, int]:
        """Of what goes along with the stream."""
        return self.sequences, self.length + 1 if self.columns is None else self.columns

    def targets(self, rows: Tensor) -> Tensor:
        """Of rows of integers, whole or as they came, those that the loss is about: the last `length`."""
        return rows[:, -self.length :]

    @property
    def held_bytes(self) -> int:
        """Of the payload where it is held."""
        return prod(self.payload_shape) * self.dtype.itemsize

    @property
    def payload_bytes(self) -> int:
        """Of the payload on the wire."""
        return self.codec.wire_bytes(prod(self.payload_shape), self.dtype)

    @property
    def gradient_bytes(self) -> int:
        """Of the payload's gradient on the wire."""
        return self.gradient_codec.wire_bytes(prod(self.payload_shape), self.dtype)

    @property
    def loss_dtype(self) -> torch.dtype:
        """In which a loss travels home: float32, or float64 where the stream is."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def ids_dtype(self) -> torch.dtype:
        """The smallest integers that hold every token id."""
        return next(dtype for most, dtype in _IDS if self.vocab <= most)

    def nbytes(self, task: Task) -> int:
        """Bytes of the message that `task` begins with."""
        if task.kind == "B":
            return self.gradient_bytes + self.loss_dtype.itemsize
        side = self.boundary.sizes(self.sequences, self.length)[1]
        ids = prod(self.ids_shape) * self.ids_dtype.itemsize if task.kind == "F" else 0
        return self.payload_bytes + side + ids

    def pack(self, payload: Tensor, side: Tensor | None, tokens: Tensor | None) -> Tensor:
        """The bytes of a message forward, on the CPU; tokens: None on the way home."""
        with host_work():
            own = [payload.detach().to(self.dtype)]
            own += [] if side is None else [side]
            own += [] if tokens is None else [tokens[:, -self.ids_shape[1] :].to(self.ids_dtype)]
            stream, *beside = (tensor.contiguous() for tensor in to_host(own))
            parts = [self.codec.encode(stream.view(-1)), *map(as_bytes, beside)]
            return torch.cat(parts) if len(parts) > 1 else parts[0].clone()

    def unpack(self, wire: Tensor, device: torch.device) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Payload, side and tokens of a message forward; the tokens are None on the way home."""
        behind = self.payload_bytes + self.boundary.sizes(self.sequences, self.length)[1]
        own = wire[behind:].clone().view(self.ids_dtype)  # a copy, for what stands behind may be unaligned
        parts = [self._decoded(self.codec, wire[: self.payload_bytes]), wire[self.payload_bytes : behind], own]
        payload, side, ids = to_device(parts, device)
        tokens = ids.view(self.ids_shape).long() if ids.numel() else None
        return payload, side if side.numel() else None, tokens

    def pack_back(self, gradient: Tensor, loss: Tensor) -> Tensor:
        """The bytes of a message backward."""
        with host_work():
            own = gradient.detach().to(self.dtype), loss.reshape(1).to(self.loss_dtype)
            stream, told = to_host(own)
            return torch.cat([self.gradient_codec.encode(stream.contiguous().view(-1)), as_bytes(told)])

    def unpack_back(self, wire: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Gradient of the payload, and the microbatch's mean loss (a scalar)."""
        told = wire[self.gradient_bytes :].clone().view(self.loss_dtype).reshape(())
        parts = [self._decoded(self.gradient_codec, wire[: self.gradient_bytes]), told]
        gradient, loss = to_device(parts, device)
        return gradient, loss

    def _decoded(self, codec: Codec, wire: Tensor) -> Tensor:
        return codec.decode(wire, prod(self.payload_shape), self.dtype).view(self.payload_shape)


def phase(task: Task) -> int:
    """The phase of a message's address: its kind and hop."""
    return MOST_VISITS * _KINDS[task.kind] + task.hop


def sender(route: Route, task: Task) -> int | None:
    """The position whose message `task` begins with; None where it begins with what its own worker has."""
    here = route.worker(task)
    if task.kind == "F":
        there = route.visits[task.hop - 1] if task.hop else here
    elif task.kind == "L":
        there = route.visits[-1]
    elif task.hop < route.last:
        there = route.visits[task.hop + 1]
    else:
        there = route.visits[0] if route.home else here
    return None if there == here else there
