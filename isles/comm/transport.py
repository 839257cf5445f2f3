"""The interface of a transport: send and recv, a clock, and a way to run a multi-phase exchange behind the computation.

Data flow of one exchange:

    protocol (generator, written once above the backends)
        yields Work | list[Work]        "resume me when these are done"
        yields AnyOf(list[Work])        "resume me when one of these is done"
        returns its result
    transport.run(protocol, deadline) -> Transfer      steps it to its first wait at once, the rest behind the
    computation
    transfer.wait() -> result            blocks the computation; raises PeerLost, DeadlinePassed, Diverged

Transfers start in program order, and their messages leave in that order; any number may be under way.
No code above a transport may assume that `size` is constant: divide by the number of an answer's participants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from isles.comm.tags import Channel, Tag
from isles.comm.traffic import Traffic

T = TypeVar("T", covariant=True)

SUSPECT_AFTER = 1.0
"""Seconds of waiting for a peer until it is suspected."""
SUSPECT_EVERY = 0.25
"""Seconds from one suspicion of it to the next."""


class Work(Protocol):
    """One message on its way. It keeps its buffer alive until the message has left or has arrived."""

    peer: int | None  # the other rank; for a receive from anyone, None until the message has arrived
    at: float  # time on the worker's clock, seconds, when the work was done; infinity before
    error: Exception | None  # the error of a failed work; else None

    def done(self) -> bool:
        """True once the message has left (send) or arrived (receive), or once it failed."""


class WaitEvent(Work, Protocol):
    """A work that is done when this worker, or one of its protocols, calls `set`."""

    def set(self) -> None:
        """Mark it done. A second call has no effect."""


@dataclass(frozen=True, slots=True)
class AnyOf:
    """A protocol yields this to continue as soon as one of `works` is done, or at once if `works` is empty.

    A failed work among them raises its error each time: leave it out of later calls.
    """

    works: Sequence[Work]


Steps = Generator[Work | Sequence[Work] | AnyOf, None, T]
"""A protocol: yields the work it waits for and returns its result. The yield raises the error of a failed work."""


def works_of(waited: Work | Sequence[Work] | AnyOf) -> tuple[Sequence[Work], int]:
    """The works of a yielded `waited`, and how many of them must be done before the protocol continues."""
    if isinstance(waited, AnyOf):
        return waited.works, min(len(waited.works), 1)
    works = waited if isinstance(waited, Sequence) else [waited]
    return works, len(works)


class Transfer(Protocol[T]):
    """An exchange under way."""

    def wait(self) -> T:
        """Block until the protocol has ended, and return its result or raise its error.

        The time spent here counts as blocked seconds of the transfer's channel. May be called again.
        """

    def done(self) -> bool:
        """True once `wait` would return at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Longest wait for a peer by channel, seconds, counted from the start of the transfer.

    outer: raise it if workers differ in speed by more than this over one round of `sync_every` steps. eval: raise it if
    validation takes minutes on the slowest worker. control: raise it if workers start, compile or end minutes apart.
    slowest_link: bits per second; a transfer may always take five times as long as its bytes need on such a link. Lower
    it if big models meet slow links and a live peer is reported as late.
    join: until all workers have met; raise it if they start minutes apart. silence: a worker counts as lost after this
    many seconds without a heartbeat (each sends one every 2 s, whatever it computes or waits for); raise it to survive
    longer link outages.
    """

    control: float = 120.0
    inner: float = 60.0
    outer: float = 60.0
    eval: float = 600.0
    pipeline: float = 75.0
    slowest_link: float = 10e6
    join: float = 300.0
    silence: float = 60.0

    def of(self, channel: Channel, nbytes: int = 0) -> float:
        """The deadline of a transfer on `channel` in which this worker sends `nbytes`, seconds."""
        return max(getattr(self, channel), 5 * 8 * nbytes / self.slowest_link)


class LinkEstimate(NamedTuple):
    """The slowest link from this worker to another machine, as measured so far.

    rate: bits per second; None: not known yet. tries_soon: whether the kernel retransmits soon after an outage.
    """

    rate: float | None
    tries_soon: bool


class Transport(Protocol):
    """One worker's end of a transport. Buffers are flat contiguous uint8 CPU tensors; views are allowed."""

    @property
    def rank(self) -> int:
        """This worker's number, 0..size-1."""

    @property
    def size(self) -> int:
        """Number of workers."""

    @property
    def traffic(self) -> Traffic:
        """What this worker sent, received and waited for, as counted by its groups."""

    @property
    def step_seconds(self) -> float:
        """Seconds charged for an inner step (virtual); 0.0 where the host's clock measures (distributed)."""

    @property
    def away_seconds(self) -> float:
        """Seconds for which this worker was paused (virtual); 0.0 on backends without pauses."""

    def send(self, peer: int, data: Tensor, tag: Tag) -> Work:
        """Start sending `data` and return at once. Do not write to `data` before it has left."""

    def recv(self, peer: int | None, out: Tensor, tag: Tag) -> Work:
        """Post a receive of `out.numel()` bytes from `peer` (None: from anyone; `work.peer` then names the sender)."""

    @property
    def native(self) -> bool:
        """True if the backend has its own collectives: its transports are also `NativeCollectives`."""

    def run(self, protocol: Steps[Any], channel: Channel, deadline: float) -> Transfer[Any]:
        """Start `protocol` and drive it behind the computation. It fails after `deadline` seconds."""

    def event(self, seconds: float = math.inf) -> WaitEvent:
        """A work without a message, for `AnyOf`. It is done when it is set, or after `seconds`."""

    def link_estimate(self) -> LinkEstimate | None:
        """The slowest link to another machine; None if there is none or it is unknown."""

    def now(self) -> float:
        """Seconds since this worker's start, on the backend's clock."""

    def compute(self, seconds: float) -> None:
        """Charge `seconds` of computation (virtual: times speed and jitter; distributed: nothing, it is measured)."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able clock and message numbers (virtual), for a checkpoint taken while no transfer is under way."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""

    def close(self) -> None:
        """Release threads and connections. Safe to call twice."""


@runtime_checkable
class NativeCollectives(Protocol):
    """A transport of a backend that has its own collectives."""

    def native_sum(self, buffer: Tensor, ranks: tuple[int, ...]) -> Work:
        """Start summing `buffer` (CPU or CUDA, any float dtype) over `ranks`, in place, with the backend's own
        collective: NCCL for CUDA buffers. The backend chooses the order of the sums.
        """

    def followed(self, start: Callable[[], Any], ranks: tuple[int, ...]) -> Any:
        """Call `start`, which posts torch's own collectives on the GPUs of `ranks`, and return its result. PeerLost if
        one of `ranks` was lost before.
        """

    def process_group(self, ranks: tuple[int, ...], device: str) -> Any:
        """torch.distributed's group of `ranks` for tensors on `device` ("cpu" or "cuda"), for torch's own messages."""


def native_collectives(transport: Transport) -> NativeCollectives:
    """The transport's own collectives. ValueError if its backend has none."""
    if not isinstance(transport, NativeCollectives):
        raise ValueError("this backend has no collectives and no process groups of its own: use the two-shot mean")
    return transport
