"""The connections to a run's workers, as a launcher sees them, and the worker processes of this machine.

A `Link` speaks for one worker of this machine (`PipeLink`) or for all of another machine
(`isles.launch.relay.NodeLink`); who decides (`isles.launch.workers`) and who relays (`isles.launch.relay`) does not
ask which.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from isles.comm.errors import WorkerFailed
from isles.launch.worker import Seat, serve

Message = tuple[int, str, Any]
"""(rank, "event" | "held" | "done" | "error", value); rank -1 with "interrupt": somebody wants the run to stop."""


class Link(Protocol):
    """A connection that speaks for the workers `ranks`."""

    ranks: tuple[int, ...]
    lost: bool  # nothing more will come

    def fileno(self) -> int:
        """For select and its relatives."""
        ...

    def read(self) -> list[Message]:
        """What has come, without waiting. A connection that is lost is an "error" of each of its workers."""
        ...

    def tell(self, order: Any) -> None:
        """Pass an order on; one that is gone is not told."""
        ...


class PipeLink:
    """The worker of rank `rank`, a process of this machine (None: this process itself, under torchrun)."""

    def __init__(
        self, rank: int, pipe: Connection, process: BaseProcess | None = None, log: Path | None = None
    ) -> None:
        self.ranks: tuple[int, ...] = (rank,)
        self.lost = False
        self.pipe, self.process, self.log = pipe, process, log

    def fileno(self) -> int:
        """See Link."""
        return self.pipe.fileno()

    def read(self) -> list[Message]:
        """See Link."""
        (rank,) = self.ranks
        try:
            if self.lost or not self.pipe.poll():
                return []
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            self.lost = True
            kind, value = "error", WorkerFailed(rank, self._how_it_ended())
        except Exception as error:  # its class does not come back from what it was taken apart into
            kind, value = "error", WorkerFailed(rank, f"its result cannot be rebuilt in the launcher: {error!r}")
        return [(rank, kind, value)]

    def tell(self, order: Any) -> None:
        """See Link."""
        with contextlib.suppress(OSError):
            self.pipe.send(order)

    def _how_it_ended(self) -> str:
        if self.process is None:
            return "it closed its connection"
        self.process.join(2.0)
        said = (
            f" (its last words are in {self.log})" if self.log and self.log.exists() and self.log.stat().st_size else ""
        )
        return f"its process ended with exit code {self.process.exitcode}{said}"


class Crew:
    """Processes of this machine that run `worker(world, *args)`, one a seat, forked from a server that has torch."""

    def __init__(self, worker: Callable[..., Any], seats: Iterable[Seat], args: Sequence[Any] = ()) -> None:
        context = multiprocessing.get_context("forkserver")
        # The first optimizer of a process loads torch._dynamo: a second of CPU time, here once for all workers.
        context.set_forkserver_preload(["isles.launch.workers", "torch._dynamo"])
        self.links: list[PipeLink] = []
        for seat in seats:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(seat, theirs, worker, tuple(args)), name=f"isles-worker-{seat.rank}"
            )
            process.start()
            theirs.close()
            self.links.append(PipeLink(seat.rank, ours, process, seat.log))
        self.processes = [link.process for link in self.links if link.process is not None]

    def end(self, patience: float) -> None:
        """Let the workers close, and end those that have not within `patience` seconds."""
        for link in self.links:
            link.tell("close")
        ends_at = time.monotonic() + patience
        for process in self.processes:
            process.join(max(ends_at - time.monotonic(), 0.0))
        for process in self.processes:
            if process.is_alive():
                process.kill()  # also ends a stopped process
                process.join()
        for link in self.links:
            link.pipe.close()
