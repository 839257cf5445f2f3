"""What can go wrong between workers, one class a cause, so that a caller can tell a dead peer from a slow one."""

from __future__ import annotations


class CommError(RuntimeError):
    """Base of every error between workers."""


class PeerLost(CommError):
    """The connection to `rank` (-1: to someone) broke: its process ended or the link was cut. Others stay usable."""

    def __init__(self, rank: int, detail: str = "") -> None:
        who = f"worker {rank}" if rank >= 0 else "a worker"
        super().__init__(f"{who} is lost" + (f" ({detail})" if detail else ""))
        self.rank = rank
        self.detail = detail

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.rank, self.detail)


class DeadlinePassed(CommError):
    """`peer` (-1: anyone) did not answer on `channel` within `seconds`. Only this transfer ends; other pairs are
    unharmed.

    Seen when a worker is much slower than the others or paused: raise the channel's deadline
    (`Deadlines(outer=SECONDS)`, or `--set world.outer_deadline=SECONDS`) if the peer was alive.
    """

    def __init__(self, peer: int, channel: str, seconds: float) -> None:
        who = f"worker {peer} did not answer" if peer >= 0 else "no worker was heard"
        super().__init__(f"{who} on channel '{channel}' within {seconds:g} s")
        self.peer = peer
        self.channel = channel
        self.seconds = seconds

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.peer, self.channel, self.seconds)


class Diverged(CommError):
    """`peer` is not where this worker is: its step, its round or the hash of its anchor differs."""

    def __init__(self, peer: int, step: int, detail: str) -> None:
        super().__init__(f"worker {peer} diverged at step {step}: {detail}")
        self.peer = peer
        self.step = step
        self.detail = detail

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.peer, self.step, self.detail)


class WorkerFailed(CommError):
    """A worker process of this launcher ended without a result; `report` is its traceback or its exit code."""

    def __init__(self, rank: int, report: str) -> None:
        super().__init__(f"worker {rank} failed: {report}")
        self.rank = rank
        self.report = report

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.rank, self.report)
