"""The connections to a run's workers, as a launcher sees them, and the worker processes of this machine.

A `WorkerHandle` speaks for one worker of this machine (`PipeHandle`) or for all of another machine
(`isles.launch.relay.NodeHandle`); who decides (`isles.launch.workers`) and who relays (`isles.launch.relay`) does not
ask which.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess, current_process
from pathlib import Path
from typing import Any, Protocol

from isles.comm.errors import WorkerFailed
from isles.comm.sockets.connection import Silence, no_sign_of_life
from isles.comm.transport import Deadlines
from isles.launch.worker import ByValue, WorkerSpec, serve

_LONGEST_TMPDIR = 70  # characters, before those that multiprocessing adds
WorkerMessage = tuple[int, str, Any]
"""(rank, "joined" | "beat" | "event" | "held" | "done" | "error" | "interrupt", value); the last: please stop."""


class WorkerHandle(Protocol):
    """A connection that speaks for the workers `ranks`."""

    ranks: tuple[int, ...]
    lost: bool  # nothing more will come

    def fileno(self) -> int:
        """For select and its relatives."""
        ...

    def read(self) -> list[WorkerMessage]:
        """What has come, without waiting. A connection that is lost is an "error" of each of its workers."""
        ...

    def tell(self, command: Any) -> None:
        """Pass a command on; one that is gone is not told."""
        ...


class PipeHandle:
    """The worker of rank `rank`, a process of this machine (None: this process itself, under torchrun)."""

    def __init__(
        self,
        rank: int,
        pipe: Connection,
        process: BaseProcess | None = None,
        log: Path | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.ranks: tuple[int, ...] = (rank,)
        self.lost = False
        self.pipe, self.process, self.log = pipe, process, log
        waits = deadlines or Deadlines()
        self._silence = Silence(waits.silence, first=waits.join)

    def fileno(self) -> int:
        return self.pipe.fileno()

    def read(self) -> list[WorkerMessage]:
        (rank,) = self.ranks
        try:
            if self.lost:
                return []
            if not self.pipe.poll():
                return self._silent()
            kind, value = self.pipe.recv()
            self._silence.heard()
        except (EOFError, OSError):
            self.lost = True
            kind, value = "error", WorkerFailed(rank, self._how_it_ended())
        except Exception as error:  # its class does not come back from what it was taken apart into
            kind, value = "error", WorkerFailed(rank, f"its result cannot be rebuilt in the launcher: {error!r}")
        return [(rank, kind, value)]

    def tell(self, command: Any) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(command)

    def _silent(self) -> list[WorkerMessage]:
        """A process that gives no sign of life is ended, so that whoever waits for it hears of it at once."""
        if not self._silence.over():
            return []
        self.lost = True
        if self.process is not None:
            self.process.kill()  # also ends one that is stopped
        (rank,) = self.ranks
        return [(rank, "error", WorkerFailed(rank, no_sign_of_life(self._silence.limit)))]

    def _how_it_ended(self) -> str:
        if self.process is None:
            return "it closed its connection"
        self.process.join(2.0)
        said = (
            f" (its last words are in {self.log})" if self.log and self.log.exists() and self.log.stat().st_size else ""
        )
        if self.process.exitcode == 1 and not said and not self._silence.has_heard:
            said = (
                " before it began (the reason is printed above): a script that starts workers needs `if __name__ == "
                '"__main__":` around what it runs'
            )
        return f"its process ended with exit code {self.process.exitcode}{said}"


class WorkerProcesses:
    """Processes of this machine that run `worker(world, *args)`, one a spec, forked from a server that has torch."""

    def __init__(
        self, worker: Callable[..., Any], worker_specs: Iterable[WorkerSpec], args: Sequence[Any] = ()
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["isles.launch.workers", "isles.launch.preload"])
        self.handles: list[PipeHandle] = []
        _refuse_unreachable(worker)
        _shorten_sockets()
        work = ByValue((worker, tuple(args)))
        for spec in worker_specs:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(spec, theirs, work), name=f"isles-worker-{spec.rank}")
            process.start()
            theirs.close()
            self.handles.append(PipeHandle(spec.rank, ours, process, spec.log, spec.deadlines))
        self.processes = [handle.process for handle in self.handles if handle.process is not None]

    def end(self, patience: float) -> None:
        """Let the workers close, and end those that have not within `patience` seconds."""
        for handle in self.handles:
            handle.tell("close")
        ends_at = time.monotonic() + patience
        for process in self.processes:
            process.join(max(ends_at - time.monotonic(), 0.0))
        for process in self.processes:
            if process.is_alive():
                process.kill()  # also ends a stopped process
                process.join()
        for handle in self.handles:
            handle.pipe.close()


def _refuse_unreachable(worker: Callable[..., Any]) -> None:
    """ValueError for a function that a new process cannot import: typed into a notebook, `python -c` or stdin."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    is_typed = getattr(worker, "__module__", None) == "__main__" and file is None and main.__spec__ is None
    if is_typed or (file is not None and file.endswith("<stdin>")):
        raise ValueError(
            f"{getattr(worker, '__qualname__', worker)}: new processes cannot import what is typed into a notebook, "
            "`python -c` or stdin; write the function into a module and import it, or use isles.run_virtual, which "
            "trains in this process"
        )


def _shorten_sockets() -> None:
    """The addresses of multiprocessing's sockets are files in TMPDIR, and may have 107 characters."""
    own: dict[str, Any] = current_process()._config  # type: ignore[attr-defined]  # where it looks for its folder
    if own.get("tempdir") is None and len(os.fsencode(tempfile.gettempdir())) > _LONGEST_TMPDIR:
        own["tempdir"] = tempfile.mkdtemp(prefix="isles-", dir="/tmp")
        atexit.register(shutil.rmtree, own["tempdir"], ignore_errors=True)
