"""A launcher's connections to the workers of a run, the worker processes of this machine, and the messages between the
launchers of several machines: node 0 decides, the others forward what their workers and node 0 send.

A `WorkerHandle` stands for one worker of this machine (`PipeHandle`) or for all of another machine (`NodeHandle`). The
code that decides (`isles.launch.workers`) and the code that forwards (`RemoteWorkers`) treat both alike.

node k's workers  <--pipes-->  node k's launcher, `RemoteWorkers`  <--a link-->  a `NodeHandle` of node 0's `Workers`

    up      [rank, "joined" | "beat" | "event" | "held" | "done" | "error", value]    of a worker
            [-1, "interrupt", None]    Ctrl-C on node k    [-1, "leaving", error]    it ends early, and why
    down    "hold" | ["stop", step] | ["lost", rank] | ["moved", counts] | "close"    commands for every worker
            {"command": ...}                                       a command for the launcher itself
            {"over": error | None}                                 after "close": how the run ended
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
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess, current_process
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, cast

from typing_extensions import override

from isles.base.errors import printable
from isles.base.parsing import MANY, Int, Unfit, integer, read
from isles.comm.errors import NodeLost, WorkerFailed, from_plain, to_plain
from isles.comm.sockets.connection import LinkLost, Silence, no_sign_of_life
from isles.comm.transport import Deadlines
from isles.launch.nodes import Link, NodeGroup
from isles.launch.worker import ByValue, WorkerSpec, serve

_LONGEST_TMPDIR = 70  # characters, before those that multiprocessing adds
WorkerMessage = tuple[int, str, Any]
"""(rank, "joined" | "beat" | "event" | "held" | "done" | "error" | "interrupt", value); the last asks all to stop."""


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
        """For select and similar functions."""
        return self.pipe.fileno()

    def read(self) -> list[WorkerMessage]:
        """The messages that have arrived, without waiting. A lost connection is an "error" of each of its workers."""
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
        except Exception as error:  # its class cannot be unpickled
            kind, value = "error", WorkerFailed(rank, f"its result cannot be rebuilt in the launcher: {error!r}")
        return [(rank, kind, value)]

    def tell(self, command: Any) -> None:
        """Send a command, unless the connection is lost."""
        with contextlib.suppress(OSError):
            self.pipe.send(command)

    def _silent(self) -> list[WorkerMessage]:
        """End a process that gives no sign of life, so that the others learn of it at once."""
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
    """Processes of this machine that run `worker(world, *args)`, one per spec, forked from a server that has torch."""

    def __init__(
        self, worker: Callable[..., Any], worker_specs: Iterable[WorkerSpec], args: Sequence[Any] = ()
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["isles.launch.workers", "isles.launch.preload"])
        self.handles: list[PipeHandle] = []
        _shorten_sockets()
        work = ByValue((worker, tuple(args)))
        with _main_for(worker, args):
            for spec in worker_specs:
                ours, theirs = context.Pipe()
                process = context.Process(target=serve, args=(spec, theirs, work), name=f"isles-worker-{spec.rank}")
                process.start()
                theirs.close()
                self.handles.append(PipeHandle(spec.rank, ours, process, spec.log, spec.deadlines))
        self.processes = [handle.process for handle in self.handles if handle.process is not None]

    def end(self, patience: float) -> None:
        """Let the workers close, and kill those that have not ended within `patience` seconds."""
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


@contextlib.contextmanager
def _main_for(worker: Callable[..., Any], args: Sequence[Any]) -> Iterator[None]:
    """Context in which processes start. multiprocessing runs the caller's script in each again, but workers of Isles
    that need nothing of it do without. ValueError for a worker that is typed into a notebook, `python -c` or stdin.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    is_typed = getattr(worker, "__module__", None) == "__main__" and file is None and main.__spec__ is None
    if str(getattr(worker, "__module__", None)).startswith("isles.") and "__main__:" not in repr(args):
        sys.modules["__main__"] = ModuleType("__main__")
    elif is_typed or (file is not None and file.endswith("<stdin>")):
        raise ValueError(
            f"{getattr(worker, '__qualname__', worker)}: new processes cannot import what is typed into a notebook, "
            "`python -c` or stdin; write the function into a module and import it, or use isles.run_virtual, which "
            "trains in this process"
        )
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _shorten_sockets() -> None:
    """Use a shorter folder for multiprocessing's sockets if TMPDIR is long: socket paths have at most 107
    characters.
    """
    own: dict[str, Any] = current_process()._config  # type: ignore[attr-defined]  # where it looks for its folder
    if own.get("tempdir") is None and len(os.fsencode(tempfile.gettempdir())) > _LONGEST_TMPDIR:
        own["tempdir"] = tempfile.mkdtemp(prefix="isles-", dir="/tmp")
        atexit.register(shutil.rmtree, own["tempdir"], ignore_errors=True)


_GLANCE = 0.2  # seconds between looks at the link
_WORKERS = ("joined", "beat", "event", "held", "done", "error")  # kinds that a launcher forwards, and its own below
_LAUNCHERS = ("interrupt", "leaving")
_SIGNS = ("joined", "beat")
_COUNT = 1 << 63
_Counts = Annotated[list[Int], MANY]
_Order = Literal["hold", "close"] | tuple[Literal["stop", "lost"], Int] | tuple[Literal["moved"], _Counts]
_ERRORS = ("error", "leaving")
MessageCheck = Callable[[str, Any, Container[int]], Any]
"""(kind, value, ranks) of a message of another machine about its workers -> the checked value. Raises `Unfit` if
it is invalid.
"""
_VERDICT = 60.0  # seconds for node 0 to report how the run ended


def anything(kind: str, value: Any, ranks: Container[int]) -> Any:
    """The check of runs on one machine, which get no messages of others."""
    return value


def order(command: Any) -> Any:
    """Node 0's command for every worker; None for a message to launchers. LinkLost for anything else."""
    if isinstance(command, dict):
        return None
    try:
        return read(_Order, command, "an order")
    except Unfit:
        raise LinkLost("it sends something else than isles messages") from None


def await_outcome(link: Link) -> None:
    """Wait for node 0's report of the end, and raise the error with which the run ended, if any."""
    while not isinstance(message := link.receive(_VERDICT), dict) or "over" not in message:
        pass
    if message["over"] is not None:
        raise from_plain(message["over"])


class NodeHandle:
    """All workers of another machine, on node 0."""

    def __init__(self, node: int, ranks: tuple[int, ...], link: Link, check: MessageCheck) -> None:
        self.node, self.ranks, self.link, self._check = node, ranks, link, check
        self.lost = False

    def fileno(self) -> int:
        return self.link.fileno()

    def read(self) -> list[WorkerMessage]:
        if self.lost:
            return []
        try:
            messages = [self._message(message) for message in self.link.ready()]
        except LinkLost as error:
            return self._gone(self.loss(error))
        left = [value for rank, kind, value in messages if kind == "leaving"]
        return messages if not left else self._gone(NodeLost(self.node, f"({self.link.there}) gave up: {left[0]}"))

    def tell(self, command: Any) -> None:
        with contextlib.suppress(LinkLost):
            self.link.send(command)

    def loss(self, why: LinkLost) -> Exception:
        """The error to report for a lost connection."""
        return _lost(self.node, self.link, why)

    def _gone(self, error: Exception) -> list[WorkerMessage]:
        self.lost = True
        return [(rank, "error", error) for rank in self.ranks]

    def _message(self, message: Any) -> WorkerMessage:
        try:
            rank, kind, value = message
            if type(rank) is not int or kind not in (_LAUNCHERS if rank == -1 else _WORKERS):
                raise Unfit("a message of no kind that isles has")
            if rank not in (-1, *self.ranks):
                raise Unfit(f"worker {rank} is none of its")
            if kind in _SIGNS:
                return rank, kind, integer({kind: value or 0}, kind, 0, _COUNT)
            return rank, kind, from_plain(value) if kind in _ERRORS else self._check(kind, value, self.ranks)
        except (TypeError, ValueError) as error:
            why = f": {printable(str(error))}" if isinstance(error, Unfit) else ""
            raise LinkLost(f"it sends something else than isles messages{why}") from None


class ProcessHandle(NodeHandle):
    """The handle of a single worker that another program has started, such as torchrun."""

    @override
    def loss(self, why: LinkLost) -> Exception:
        return WorkerFailed(self.ranks[0], f"its process is gone: {why}")


WorkerHandle = PipeHandle | NodeHandle
"""A connection that stands for the workers `ranks`; `lost` once it will send nothing more."""


class RemoteWorkers:
    """The workers of a machine other than node 0; `join` forwards their messages until node 0 ends the run."""

    def __init__(
        self,
        worker: Callable[..., Any],
        worker_specs: Sequence[WorkerSpec],
        *,
        args: Sequence[Any] = (),
        node_group: NodeGroup,
    ) -> None:
        self._link = node_group.links[0]
        self._stop_wanted = False
        self._pool = WorkerProcesses(worker, worker_specs, args)
        self.processes = self._pool.processes

    def stop(self) -> None:
        """Ask node 0 to stop the run. May be called from a signal handler."""
        self._stop_wanted = True

    def join(self, on_event: Callable[[Any], None], on_command: Callable[[Any], None]) -> list[Any]:
        """The results of this machine's workers, once node 0 has ended the run. Ends every process of this machine.

        on_event: as in LocalWorkers, with this machine's events. on_command: called with what node 0 sends under
        "command". Raises the error that node 0 reports; NodeLost if node 0 itself is lost.
        """
        results: dict[int, Any] = {}
        asked, patience = False, 1.0
        try:
            try:
                while True:
                    if self._stop_wanted and not asked:
                        asked = True
                        self._link.send([-1, "interrupt", None])
                    wait(
                        cast(Any, [self._link, *(handle for handle in self._pool.handles if not handle.lost)]), _GLANCE
                    )
                    for rank, kind, value in [message for handle in self._pool.handles for message in handle.read()]:
                        if kind == "event":
                            on_event(value)
                        elif kind == "done":
                            results[rank] = value
                        if kind == "interrupt":
                            self._stop_wanted = True
                        else:
                            self._pass_on(rank, kind, value)
                    if self._obey(on_command):
                        patience = 10.0 if len(results) == len(self._pool.handles) else patience
                        break
            finally:
                self._pool.end(patience)
            await_outcome(self._link)
        except LinkLost as error:
            raise _lost(0, self._link, error) from None
        return [results[rank] for rank in sorted(results)]

    def _obey(self, on_command: Callable[[Any], None]) -> bool:
        """Execute the commands that have arrived from node 0; True once it closes."""
        while (command := self._link.next()) is not None:
            if command == "close":
                return True
            if (answer := order(command)) is None:
                on_command(command.get("command"))
            else:
                for handle in self._pool.handles:
                    handle.tell(answer)
        return False

    def _pass_on(self, rank: int, kind: str, value: Any) -> None:
        if kind == "error":
            value = to_plain(value)
        try:
            self._link.send([rank, kind, value])
        except (TypeError, ValueError):
            answer = to_plain(WorkerFailed(rank, f"its {kind} cannot be sent to node 0: JSON holds no such value"))
            self._link.send([rank, "error", answer])


def _lost(node: int, link: Link, why: LinkLost) -> NodeLost:
    return NodeLost(node, f"({link.there}) is lost: {why}")
