"""A worker's side of a run: join the world, work, and follow the launcher's commands meanwhile.

launcher                            worker
"hold" | ("stop", step) | "close"   ----->   received by a thread of its own; it ends the process when the launcher ends
("lost", rank) | ("moved", counts)  ----->   of other workers: see `isles.comm.gloo.transfers`
                                    <-----   ("joined", None) when all have met; ("beat", bytes moved) every two seconds
                                    <-----   ("event", value) | ("held", step) | ("done", result) | ("error", exception)
                                    <-----   ("interrupt", None): somebody asked this process to end (SIGTERM), and
                                             it cannot leave while the others go on

After its result the worker stays until "close", because others may still need its connections. After an error it ends
at once, so that the others notice; also after an agreed leave, of which all others know.

Tensors go through the pipe by value (`ByValue`). Torch's own way shares a tensor's memory, which needs a file
descriptor per tensor (`ulimit -n`), room in /dev/shm, and a sender that lives until the reader has looked.

Workers meet at a TCP store. It listens at one address only, while torch's default is all of them, because it does not
authenticate clients.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from io import BytesIO
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from isles.base.durable import no_room
from isles.comm import mesh
from isles.comm.errors import CommError, WorkerFailed
from isles.comm.gloo.transfers import Liveness
from isles.comm.gloo.transport import DistributedTransport
from isles.comm.sockets.connection import begin_pulse
from isles.comm.stopping import LeaveControl, StopControl
from isles.comm.tcp import listen
from isles.comm.transport import Deadlines

_PATIENCE = timedelta(minutes=5)


def open_store(host: str) -> dist.TCPStore:
    """Host the store at a free port of this machine's address `host`, as long as the object lives."""
    listening = listen(0, host)
    port = listening.getsockname()[1]
    return dist.TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listening.detach())


def join_store(host: str, port: int) -> dist.TCPStore:
    """A worker's connection to the store."""
    return dist.TCPStore(host, port, None, False, timeout=_PATIENCE)


class _Pickler(ForkingPickler):
    """Multiprocessing's pickler without torch's additions."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)
        self.dispatch_table = {
            kind: reduce
            for kind, reduce in self.dispatch_table.items()
            if getattr(reduce, "__module__", "") != reductions.__name__
        }
        self._storages: dict[int, Any] = {}

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, torch.storage.TypedStorage):  # made anew for each tensor over the same memory
            first = self._storages.setdefault(thing._untyped_storage._cdata, thing)
            return NotImplemented if first is thing else (_same, (first, thing.dtype))
        return NotImplemented


class ByValue:
    """A pickled value for a new process; `open` unpickles it there, so that a failure can be reported."""

    def __init__(self, value: Any, made: bytes | None = None) -> None:
        self._value, self._made = value, made

    def open(self) -> Any:
        return self._value if self._made is None else ForkingPickler.loads(self._made)

    def __reduce__(self) -> tuple[Callable[..., ByValue], tuple[Any, ...]]:
        return ByValue, (None, dumps(self._value) if self._made is None else self._made)


class ByValueConnection:
    """A worker's end of the pipe to its launcher."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.recv = pipe.recv

    def send(self, message: tuple[str, Any], /) -> None:
        self._pipe.send_bytes(dumps(message))


def dumps(value: Any) -> bytes:
    """Pickle for a pipe's `recv`."""
    file = BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _same(storage: Any, dtype: torch.dtype) -> Any:
    return torch.storage.TypedStorage(wrap_storage=storage._untyped_storage, dtype=dtype, _internal=True)


class LauncherConnection(Protocol):
    """The connection to the launcher: a multiprocessing pipe, or its equivalent over a network."""

    def send(self, message: tuple[str, Any], /) -> None:
        """Send one message; OSError if the launcher is gone."""

    def recv(self) -> Any:
        """The launcher's next command; EOFError or OSError if it is gone."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a worker needs to know to join.

    local_rank: its number on this machine; local_size: workers of this machine. host, port: of the store where workers
    meet. interface: the network interface for gloo; None: gloo chooses. log: file for its output; None: the terminal.
    """

    rank: int
    size: int
    local_rank: int
    host: str
    port: int
    threads: int
    interface: str | None
    local_size: int = 1
    deadlines: Deadlines | None = None
    log: Path | None = None


def serve(spec: WorkerSpec, pipe: Connection, work: ByValue) -> None:
    """Run a worker process. work: the function and its further arguments."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher handles Ctrl-C and a closed terminal
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked in the server that it was forked from
    os.environ["LOCAL_WORLD_SIZE"] = str(spec.local_size)
    if spec.log is not None:
        _print_into(spec.log)

    def worker(world: mesh.Mesh) -> Any:
        function, args = work.open()
        return function(world, *args)

    if not attend(spec, ByValueConnection(pipe), lambda: join_store(spec.host, spec.port), worker, (), asked):
        os._exit(1)  # transfers may be stuck on lost peers: do not wait for them
    mesh.leave()


def attend(
    spec: WorkerSpec,
    launcher: LauncherConnection,
    store: Callable[[], dist.Store],
    worker: Callable[..., Any],
    args: tuple[Any, ...],
    asked: threading.Event | None = None,
) -> bool:
    """Join, run `worker(world, *args)`, report the outcome to the launcher, and wait until it closes. Returns whether
    it succeeded; the caller then leaves the mesh. asked: set when this process is asked to end.
    """
    torch.set_num_threads(spec.threads)
    if spec.interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", spec.interface)  # the host's name need not resolve
    closing, stop_control, sending = threading.Event(), StopControl(), threading.Lock()
    life = Liveness((spec.deadlines or Deadlines()).silence)

    def send(message: tuple[str, Any]) -> None:
        with sending:  # the watcher thread sends too, and messages must not mix
            launcher.send(message)

    watch = threading.Thread(target=_watch_launcher, args=(launcher, send, closing, stop_control, life), daemon=True)
    watch.start()  # also while it joins
    leaving = LeaveControl(lambda: send(("interrupt", None)))
    begin_pulse(send, closing, life.moved, asked or threading.Event(), leaving)
    try:
        transport = DistributedTransport.join(dist.PrefixStore("isles", store()), spec.rank, spec.size, life)
        mesh.enter(transport, spec.local_rank)
        send(("joined", None))
        world = replace(
            mesh.init(deadlines=spec.deadlines),
            report=lambda event: send(("event", event)),
            stop_here=stop_control.boundary,
            leaving=leaving,
        )
        message = ("done", worker(world, *args))
    except Exception as error:  # the launcher reports it
        message = ("error", _portable(error, spec))
    try:
        send(message)
    except Exception as error:  # a result that cannot be pickled is the worker's failure, not a reason to hang
        reason = _text(message[1]) if message[0] == "error" else f"its result cannot be sent to the launcher: {error}"
        message = ("error", WorkerFailed(spec.rank, reason))
        send(message)
    if message[0] == "error":
        return False  # at once: its peers should notice now, not at a deadline
    if not leaving.has_left:
        closing.wait()
    return True


def _print_into(log: Path) -> None:
    """Redirect the process's output to the end of `log`: prints, warnings, tracebacks, crashes of C code."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    cast(Any, sys.stdout).reconfigure(line_buffering=True)
    faulthandler.enable()


def _watch_launcher(
    launcher: LauncherConnection,
    send: Callable[[tuple[str, Any]], None],
    closing: threading.Event,
    stop_control: StopControl,
    life: Liveness,
) -> None:
    """Execute the launcher's commands; end this process when the launcher is gone."""
    while not closing.is_set():
        try:
            message = launcher.recv()
        except (EOFError, OSError):
            os._exit(1)
        if message == "hold":
            send(("held", stop_control.pause()))
        elif message == "close":
            closing.set()
        elif message[0] == "lost":
            life.lose(message[1], "its launcher counts it as lost")
        elif message[0] == "moved":
            life.set_counts(message[1])
        else:
            stop_control.stop_after(message[1])


def _portable(error: Exception, spec: WorkerSpec) -> Exception:
    """The error itself if the launcher can rebuild it, else its text."""
    if isinstance(error, (CommError, ValueError)):
        make, arguments, *_ = cast("tuple[Any, ...]", error.__reduce__())
        try:
            make(*arguments)
        except Exception as why:  # its __init__ takes other arguments than its `args`
            return WorkerFailed(
                spec.rank, f"{_text(error)}\n(as text, for {type(error).__name__} cannot be rebuilt: {why})"
            )
        return error
    if full := no_room(error):
        return WorkerFailed(spec.rank, f"{full} ({error}); make room")
    if spec.log is None:
        return WorkerFailed(spec.rank, _text(error))
    with contextlib.suppress(OSError):  # the error may be a full disk
        print(_text(error), file=sys.stderr, flush=True)
    return WorkerFailed(spec.rank, f"{_text(error).splitlines()[-1]} (traceback in {spec.log})")


def _text(error: Exception) -> str:
    return "".join(traceback.format_exception(error)).rstrip()
