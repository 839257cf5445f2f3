"""The errors between workers, one class per cause, so that a caller can tell a dead peer from a slow one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from isles.base.errors import printable


class CommError(RuntimeError):
    """Base of every error between workers. Its attributes are its constructor's arguments, in order, so that it can be
    rebuilt in another process or on another machine.
    """

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        arguments = tuple(value for name, value in vars(self).items() if name != "__notes__")
        return type(self), arguments or self.args


class PeerLost(CommError):
    """The connection to `rank` (-1: unknown) broke: its process ended or the link was cut. Others stay usable."""

    def __init__(self, rank: int, detail: str = "") -> None:
        who = f"worker {rank}" if rank >= 0 else "a worker"
        super().__init__(f"{who} is lost" + (f" ({detail})" if detail else ""))
        self.rank = rank
        self.detail = detail


class RoundClosed(PeerLost):
    """`rank` is alive, but has closed the round of a message or receive: it did that round without a partner or with
    others. Raised at once, instead of after a deadline.
    """

    def __init__(self, rank: int, detail: str = "that round is over there") -> None:
        super().__init__(rank, detail)


class PeerSilent(PeerLost):
    """`rank` gives no sign of life, neither to this worker nor to the lighthouse, though its connection has not broken
    yet. Raised a second or two after it fell silent, instead of after a deadline or the session's lease.
    """

    def __init__(self, rank: int, detail: str = "it gives no sign of life") -> None:
        super().__init__(rank, detail)


class DeadlinePassed(CommError):
    """`peer` (-1: anyone) did not answer on `channel` within `seconds`. Only this transfer ends; other pairs are
    unharmed. detail: a usual cause, and what to do.

    Seen when a worker is much slower than the others or paused: raise the channel's deadline
    (`Deadlines(outer=SECONDS)`, or `--set world.outer_deadline=SECONDS`) if the peer was alive.
    """

    def __init__(self, peer: int, channel: str, seconds: float, detail: str = "") -> None:
        who = f"worker {peer} did not answer" if peer >= 0 else "no worker answered"
        elsewhere = (
            "; if it is alive, is it in another call? finish(), consolidate() and replica_std() are for all workers"
        )
        hint = elsewhere if channel in ("outer", "control", "eval") else ""
        reason = f" ({detail})" if detail else ""
        super().__init__(f"{who} on channel '{channel}' within {seconds:g} s{hint}{reason}")
        self.peer = peer
        self.channel = channel
        self.seconds = seconds
        self.detail = detail


class Diverged(CommError):
    """`peer` has another state than this worker: its step, its round or the hash of its anchor differs."""

    def __init__(self, peer: int, step: int, detail: str) -> None:
        super().__init__(f"worker {peer} diverged at step {step}: {detail}")
        self.peer = peer
        self.step = step
        self.detail = detail


class Elsewhere(CommError):
    """`peer` assigns this round to view `view` of the world, this worker to view `here`."""

    def __init__(self, peer: int, view: int, here: int) -> None:
        super().__init__(f"worker {peer} is in view {view} of the world, this worker in view {here}")
        self.peer = peer
        self.view = view
        self.here = here


class Malformed(CommError):
    """A message of `peer` (-1: unknown) is invalid: another length, or indices beyond the end."""

    def __init__(self, peer: int, detail: str) -> None:
        who = f"worker {peer}" if peer >= 0 else "a worker"
        super().__init__(f"{who} sent what cannot be read: {detail}")
        self.peer = peer
        self.detail = detail


class Refused(CommError):
    """A share of `peer` is not usable in this round: it is not finite, or far larger than such shares have been
    (`isles.comm.trust`). by: the worker that detected and reported it; -1: this one.
    """

    def __init__(self, peer: int, detail: str, by: int = -1) -> None:
        super().__init__(f"worker {peer}'s payload is refused: {detail}")
        self.peer = peer
        self.detail = detail
        self.by = by


@contextmanager
def sent_by(peer: int) -> Iterator[None]:
    """Malformed errors raised inside name `peer`."""
    try:
        yield
    except Malformed as error:
        raise Malformed(peer, error.detail) from None


class WorkerFailed(CommError):
    """A worker process of this launcher ended without a result. report: its traceback or its exit code."""

    def __init__(self, rank: int, report: str) -> None:
        super().__init__(f"worker {rank} failed: {report}")
        self.rank = rank
        self.report = report


class NodeLost(CommError):
    """The launcher on another machine is lost. node: its number; detail: its address and the symptom."""

    def __init__(self, node: int, detail: str) -> None:
        super().__init__(f"node {node} {detail}")
        self.node = node
        self.detail = detail


class RendezvousFailed(CommError):
    """The machines or processes of a run did not meet: one is missing at the deadline, or cannot be reached."""


def is_cause(error: Exception) -> bool:
    """Whether the error is a cause, and not merely how another worker noticed a loss."""
    causes = (WorkerFailed, NodeLost, RendezvousFailed, Malformed, Refused)
    return not isinstance(error, CommError) or isinstance(error, causes)


def to_plain(error: Exception) -> list[Any]:
    """[class, arguments] of an error, as JSON values for another machine."""
    if type(error) in _TRAVELLERS.values():
        return [type(error).__name__, list(cast("tuple[Any, ...]", error.__reduce__())[1])]
    if isinstance(error, ValueError):  # a user's mistake, whatever its class
        return ["ValueError", [str(error)]]
    return ["CommError", [str(error) or type(error).__name__]]


def from_plain(plain: Any) -> Exception:
    """The error that `to_plain` was given: of this file, or ValueError; control characters are removed from texts."""
    try:
        name, arguments = plain
        return _TRAVELLERS[name](*(_argument(value) for value in arguments))
    except (TypeError, ValueError, KeyError, OverflowError):
        return CommError(f"an error that cannot be read came from another machine: {printable(str(plain), 200)}")


def _argument(value: Any) -> str | float:
    """A checked constructor argument. ValueError for types that no error of this file takes."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, int | float) and abs(value) < 1e15:
        return value
    raise ValueError


_TRAVELLERS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        CommError,
        PeerLost,
        DeadlinePassed,
        Diverged,
        Elsewhere,
        Malformed,
        Refused,
        WorkerFailed,
        NodeLost,
        RendezvousFailed,
        ValueError,
    )
}
