"""Worker processes on this machine: forked from a server that has torch loaded, joined over gloo, never left behind.

launcher                     worker r
hosts the store  <--------   joins, runs `worker(world)`
waits            <--------   ("done", result) | ("error", exception), which also ends it
"close"           -------->  closes its connections only now, when nobody needs them any more
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch
import torch.distributed as dist

from isles.comm import mesh
from isles.comm.distributed import DistributedTransport
from isles.comm.errors import CommError, WorkerFailed
from isles.comm.orders import Orders
from isles.comm.transport import Deadlines

_GLANCE = 0.2  # seconds between looks at whether a stop is wanted or the grace has ended
_GRACE = 5.0  # seconds that workers have to notice a failed one by themselves before they are ended


def run_local(
    worker: Callable[..., Any],
    workers: int = 2,
    *,
    args: Sequence[Any] = (),
    threads: int = 1,
    deadlines: Deadlines | None = None,
    return_errors: bool = False,
) -> list[Any]:
    """Run `worker(world, *args)` in `workers` processes over gloo and return their results in rank order.

    worker: a function that a fresh process can import (defined in a module; a script needs its `if __name__ ==
    "__main__"`). threads: torch threads a worker; 1 keeps results equal to the bit on any machine. Raises the first
    failure (WorkerFailed for a process that died) after ending the others, unless `return_errors`, which lets these go
    on to their own end and puts failures in the list.
    """
    pool = LocalWorkers(worker, workers, args=args, threads=threads, deadlines=deadlines)
    if return_errors:
        return pool.join(on_failure=lambda rank, error: None)
    results = pool.join()
    raise_first(results, pool.failures)
    return results


def raise_first(results: Sequence[Any], failures: Sequence[int]) -> None:
    """Raise the earliest failure that is not merely the loss of another worker."""
    for rank in sorted(
        failures, key=lambda rank: isinstance(results[rank], CommError) and not isinstance(results[rank], WorkerFailed)
    ):
        raise results[rank]


@dataclass(frozen=True)
class _Seat:
    """What a worker process needs to know to join."""

    rank: int
    size: int
    port: int
    threads: int
    deadlines: Deadlines | None


class LocalWorkers:
    """Processes that run `worker(world, *args)`; `join` collects their results and leaves no process behind."""

    def __init__(
        self,
        worker: Callable[..., Any],
        workers: int,
        *,
        args: Sequence[Any] = (),
        threads: int = 1,
        deadlines: Deadlines | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers = {workers}: choose 1 or more")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["isles.comm.local"])
        # The store lives here, not in a worker, so that the loss of any worker leaves it standing.
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.failures: list[int] = []  # ranks in the order in which they failed
        self._stop_wanted = False
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(workers):
            ours, theirs = context.Pipe()
            seat = _Seat(rank, workers, self._store.port, threads, deadlines)
            process = context.Process(
                target=_serve, args=(seat, theirs, worker, tuple(args)), name=f"isles-worker-{rank}"
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def stop(self) -> None:
        """Ask all workers to stop after a common inner step (`Mesh.stop_here`). May be called from a signal handler."""
        self._stop_wanted = True

    def join(
        self,
        on_event: Callable[[Any], None] | None = None,
        on_failure: Callable[[int, Exception], None] | None = None,
    ) -> list[Any]:
        """Wait for all results; a failed worker's entry is its exception. Ends every process.

        on_event: called here with everything that a worker passes to `world.report`, as it comes. on_failure: told of
        each worker that failed, as soon as it has; the others then go on to their own end. Without it they have a few
        seconds to notice by themselves.
        """
        results: list[Any] = [None] * len(self.processes)
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        ends_at: float | None = None
        bounds: dict[int, int] | None = None  # by rank, how far those asked to hold may have come
        try:
            while waiting:
                if self._stop_wanted and bounds is None:
                    bounds = {}
                    self._tell(waiting, "hold")
                ready = wait(list(waiting), _GLANCE)
                if not ready and ends_at is not None and time.monotonic() > ends_at:
                    break  # the rest did not notice the failure in time: ended below
                for pipe in ready:
                    rank = waiting[pipe]  # type: ignore[index]
                    kind, value = self._collect(pipe, rank)  # type: ignore[arg-type]
                    if kind == "event":
                        if on_event is not None:
                            on_event(value)
                        continue
                    if kind == "held" and bounds is not None:
                        bounds[rank] = value
                        if bounds.keys() >= set(waiting.values()):
                            self._tell(waiting, ("stop", max(bounds.values())))
                        continue
                    del waiting[pipe]  # type: ignore[arg-type]
                    results[rank] = value
                    if kind == "error" and on_failure is not None:
                        on_failure(rank, value)
                if self.failures and ends_at is None and on_failure is None:
                    ends_at = time.monotonic() + _GRACE
            for rank in waiting.values():
                results[rank] = WorkerFailed(rank, "ended by the launcher after another worker failed")
                self.failures.append(rank)
        finally:
            self._end(patience=1.0 if waiting or self.failures else 10.0)
        return results

    @staticmethod
    def _tell(pipes: Iterable[Connection], message: Any) -> None:
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send(message)

    def _collect(self, pipe: Connection, rank: int) -> tuple[str, Any]:
        """The next message of a worker: ("event" | "held" | "done" | "error", value)."""
        try:
            kind, value = pipe.recv()
        except (EOFError, OSError):
            self.processes[rank].join(2.0)
            kind, value = (
                "error",
                WorkerFailed(rank, f"its process ended with exit code {self.processes[rank].exitcode}"),
            )
        except Exception as error:  # its class does not come back from what it was taken apart into
            kind, value = "error", WorkerFailed(rank, f"its result cannot be rebuilt in the launcher: {error!r}")
        if kind == "error":
            self.failures.append(rank)
        return kind, value

    def _end(self, patience: float) -> None:
        self._tell(self._pipes, "close")
        ends_at = time.monotonic() + patience
        for process in self.processes:
            process.join(max(ends_at - time.monotonic(), 0.0))
        for process in self.processes:
            if process.is_alive():
                process.kill()  # also ends a stopped process
                process.join()
        for pipe in self._pipes:
            pipe.close()


def _serve(seat: _Seat, pipe: Connection, worker: Callable[..., Any], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    torch.set_num_threads(seat.threads)
    _stay_on_this_machine()
    closing, orders, sending = threading.Event(), Orders(), threading.Lock()

    def send(message: tuple[str, Any]) -> None:
        with sending:  # the watcher answers while the worker reports
            pipe.send(message)

    watch = threading.Thread(target=_watch_launcher, args=(pipe, send, closing, orders), daemon=True)
    watch.start()  # also while it joins
    transport: DistributedTransport | None = None
    try:
        store = dist.TCPStore("127.0.0.1", seat.port, None, False, timeout=timedelta(minutes=5))
        transport = DistributedTransport.join(dist.PrefixStore("isles", store), seat.rank, seat.size)
        mesh.enter(transport)
        world = mesh.init(deadlines=seat.deadlines)
        world = replace(world, report=lambda event: send(("event", event)), stop_here=orders.boundary)
        message = ("done", worker(world, *args))
    except Exception as error:  # the launcher reports it
        message = ("error", _portable(error, seat.rank))
    try:
        send(message)
    except Exception as error:  # what cannot travel is the worker's failure, not a reason to hang
        told = _text(message[1]) if message[0] == "error" else f"its result cannot be sent to the launcher: {error}"
        message = ("error", WorkerFailed(seat.rank, told))
        send(message)
    if transport is None or message[0] == "error":
        os._exit(1)  # at once: peers then see the loss; transfers may be stuck: nothing is worth waiting for
    closing.wait()
    transport.close()


def _watch_launcher(
    pipe: Connection, send: Callable[[tuple[str, Any]], None], closing: threading.Event, orders: Orders
) -> None:
    """Do as the launcher says; end this process when the launcher is gone."""
    while not closing.is_set():
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            os._exit(1)
        if message == "hold":
            send(("held", orders.hold()))
        elif message == "close":
            closing.set()
        else:
            orders.stop_after(message[1])


def _portable(error: Exception, rank: int) -> Exception:
    """The error itself where the launcher can rebuild it, else its traceback as text."""
    if isinstance(error, (CommError, ValueError)):
        make, arguments, *_ = cast("tuple[Any, ...]", error.__reduce__())
        try:
            make(*arguments)
        except Exception as why:  # its __init__ takes other arguments than it hands on
            return WorkerFailed(rank, f"{_text(error)}\n(as text, for {type(error).__name__} cannot be rebuilt: {why})")
        return error
    return WorkerFailed(rank, _text(error))


def _text(error: Exception) -> str:
    return "".join(traceback.format_exception(error)).rstrip()


def _stay_on_this_machine() -> None:
    """Let gloo use the loopback interface: the host's name need not resolve."""
    loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
