"""The content, length and address of a message between stages, and how a worker waits for messages.

    F, L    [payload | side | ids]     ids: the microbatch's tokens (B, T+1), or the last columns of other rows of
                                       integers, 1, 2 or 4 bytes each; not on the way home
    B       [gradient of the payload | loss]

Payload and gradient each have a codec of their own, straight through: the backward pass is that of the uncoded payload.

A message has the address of the task that it starts. Both ends know every length in advance, so there is no header.

`StageInbox` posts a step's receives ahead. Two orders of tasks:

`planned`   in the order of a list that every worker knows: the same sums on any network.
`arrived`   by arrival, chosen by one of `ARRIVALS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from isles.base.modes import to_device, to_host
from isles.base.wrapping import host_work
from isles.comm.codecs.base import Codec, as_bytes
from isles.comm.codecs.scaled import Identity
from isles.comm.collectives.basic import all_done, any_done
from isles.comm.group import Group
from isles.comm.transport import Work
from isles.network.routing.events import MOST_VISITS, Route, Task
from isles.pipeline.boundaries.base import Boundary

_KINDS = {"F": 0, "L": 1, "B": 2}
_IDS = ((1 << 8, torch.uint8), (1 << 15, torch.int16), (1 << 31, torch.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageForm:
    """The form of messages about `sequences` of `length` tokens of `vocab` ids each, with a stream of `dtype`. codec:
    of the `boundary`'s payload; gradient_codec: of its gradient. columns: number of last columns of a row of integers
    that are sent too; None: the whole sequence, length + 1.
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
        """Shape of the boundary's payload."""
        return self.boundary.sizes(self.sequences, self.length)[0]

    @property
    def ids_shape(self) -> tuple[int, int]:
        """Shape of the integers sent with the stream."""
        return self.sequences, self.length + 1 if self.columns is None else self.columns

    def targets(self, rows: Tensor) -> Tensor:
        """The loss's targets, the last `length` columns of rows of integers."""
        return rows[:, -self.length :]

    @property
    def held_bytes(self) -> int:
        """Bytes of the payload in memory."""
        return prod(self.payload_shape) * self.dtype.itemsize

    @property
    def payload_bytes(self) -> int:
        return self.codec.wire_bytes(prod(self.payload_shape), self.dtype)

    @property
    def gradient_bytes(self) -> int:
        """Of the payload's gradient on the wire."""
        return self.gradient_codec.wire_bytes(prod(self.payload_shape), self.dtype)

    @property
    def loss_dtype(self) -> torch.dtype:
        """Format of a loss in a message: float32, or float64 for a float64 stream."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def ids_dtype(self) -> torch.dtype:
        """The smallest integers that hold every token id."""
        return next(dtype for most, dtype in _IDS if self.vocab <= most)

    def nbytes(self, task: Task) -> int:
        """Bytes of the message that starts `task`."""
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
        with host_work():
            own = gradient.detach().to(self.dtype), loss.reshape(1).to(self.loss_dtype)
            stream, loss = to_host(own)
            return torch.cat([self.gradient_codec.encode(stream.contiguous().view(-1)), as_bytes(loss)])

    def unpack_back(self, wire: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Gradient of the payload, and the microbatch's mean loss (a scalar)."""
        loss = wire[self.gradient_bytes :].clone().view(self.loss_dtype).reshape(())
        parts = [self._decoded(self.gradient_codec, wire[: self.gradient_bytes]), loss]
        gradient, loss = to_device(parts, device)
        return gradient, loss

    def _decoded(self, codec: Codec, wire: Tensor) -> Tensor:
        return codec.decode(wire, prod(self.payload_shape), self.dtype).view(self.payload_shape)


def phase(task: Task) -> int:
    """The phase of a message's address: its kind and hop."""
    return MOST_VISITS * _KINDS[task.kind] + task.hop


def sender(route: Route, task: Task) -> int | None:
    """The position that sends the message of `task`; None if it starts without a message."""
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


Rank = Callable[[Task, float], tuple[float, ...]]
"""Priority of a task whose input arrived at a given second: the lowest is done first."""

ARRIVALS: dict[str, Rank] = {
    "arrival": lambda task, came: (task.kind == "F", came, task.microbatch, task.hop),
    "first come": lambda task, came: (came, task.microbatch, task.hop),
}
_LEAST, _MOST = 2, 8


def receives_ahead(room: int | None) -> int:
    """Number of receives posted ahead, if so many forwards may be held (None: no limit): enough to hide a message
    behind earlier tasks, within the memory of the limit.
    """
    return _MOST if room is None else min(max(room, _LEAST), _MOST)


@dataclass(slots=True)
class StageInbox:
    """The messages of one step for one worker of `group`. first: offset of a microbatch's number in the run, so that no
    two messages have the same address.
    """

    group: Group
    form: StageForm
    routes: dict[int, Route]
    first: int
    posted: dict[Task, tuple[Work, Tensor]] = field(default_factory=dict)

    def address(self, task: Task) -> tuple[int, int]:
        """Round and phase of the message that `task` begins with."""
        return self.first + task.microbatch, phase(task)

    def expect(self, task: Task) -> None:
        """Post the receive for `task`, if it starts with a message from another worker."""
        source = sender(self.routes[task.microbatch], task)
        if source is None or task in self.posted:
            return
        number, step_phase = self.address(task)
        with host_work():  # a message lies on the host
            buffer = torch.empty(self.form.nbytes(task), dtype=torch.uint8, device="cpu")
            self.posted[task] = self.group.call("pipeline", round=number).recv(source, buffer, step_phase), buffer

    def is_here(self, task: Task) -> bool:
        """Whether the message of `task` has arrived."""
        return task in self.posted and self.posted[task][0].done()

    def take(self, task: Task) -> Tensor:
        work, buffer = self.posted.pop(task)
        if not work.done() or work.error is not None:
            self.group.start(all_done([work]), "pipeline", nbytes=buffer.numel()).wait()
        return buffer

    def wait_for_any(self) -> None:
        """Wait until a posted receive is done."""
        works = [work for work, _ in self.posted.values() if not work.done()]
        self.group.start(any_done(works), "pipeline", nbytes=max(b.numel() for _, b in self.posted.values())).wait()


def planned(tasks: Sequence[Task], inbox: StageInbox, ahead: int) -> Iterator[Task]:
    """`tasks` in their order, with the receives of the next `ahead` posted."""
    for task in tasks[:ahead]:
        inbox.expect(task)
    for number, task in enumerate(tasks):
        if number + ahead < len(tasks):
            inbox.expect(tasks[number + ahead])
        yield task


def arrived(
    tasks: Sequence[Task],
    inbox: StageInbox,
    since: Mapping[Task, float],
    has_room: Callable[[], bool],
    rank: Rank,
    ahead: int,
) -> Iterator[Task]:
    """`tasks` in order of arrival. since: by task that needs no message, when it was ready, live; has_room: whether one
    more forward may be held; rank: orders the ready tasks (`ARRIVALS`); ahead: number of forwards with posted receives.
    """
    left = dict.fromkeys(tasks)
    while left:
        for task in _window(left, ahead):
            inbox.expect(task)
        ready = [task for task in left if task in since or inbox.is_here(task)]
        ready = [task for task in ready if task.kind != "F" or has_room()]
        if not ready:
            inbox.wait_for_any()
            continue
        task = min(ready, key=lambda task: rank(task, since[task] if task in since else inbox.posted[task][0].at))
        del left[task]
        yield task


def _window(left: dict[Task, None], ahead: int) -> list[Task]:
    """The next forwards, and the backwards of all earlier ones: memory must never be held for a message whose receive
    is not posted.
    """
    forwards = [task for task in left if task.kind == "F"]
    back = [task for task in left if task.kind != "F"]  # L is of the origin, hop 0
    been = [task for task in back if Task("F", task.microbatch, 0 if task.kind == "L" else task.hop) not in left]
    return forwards[:ahead] + been
