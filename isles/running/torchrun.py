"""A run in processes that torchrun, srun or mpirun has started: each is a worker, and rank 0's is also the launcher.

rank 0     main thread: worker 0    <--pipe-->    a thread: `launch`, with its metrics, checkpoints and summary
rank k     main thread: worker k    <--link-->    the same thread of rank 0

All write into one run directory, so several machines need a shared file system; without one, use --nodes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import torch.distributed as dist

from isles.base.scratch import scratch
from isles.comm import credentials, mesh
from isles.comm.credentials import parse_token
from isles.comm.errors import WorkerFailed, to_plain
from isles.comm.gloo.transport import attempt, failing_as
from isles.comm.sockets.connection import LinkLost
from isles.comm.tcp import interface_of, listen, loopback, own_address, written
from isles.launch.handles import PipeHandle, await_outcome, order
from isles.launch.nodes import Link, NodeGroup, NodeSpec
from isles.launch.worker import WorkerSpec, attend
from isles.launch.workers import Workers, node_handles
from isles.running.agree import meet_nodes
from isles.running.backends import train_process
from isles.running.run import launch
from isles.training.config.sections import Config
from isles.training.records.events import Schema, begun, checks_host_messages
from isles.training.records.summary import SummaryTable
from isles.training.worker import deadlines

_OF_SCHEDULERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_GLANCE = 0.2  # seconds between two checks for a requested stop


def take_part(
    config: Config,
    out: Callable[[], Path],
    on_metrics: Callable[[dict[str, Any]], None],
    on_notice: Callable[[str], None],
    resume: int | None,
) -> tuple[Path, SummaryTable, tuple[int, ...]] | None:
    """Work as the worker of torchrun's environment. Returns on rank 0 the run directory, the summary, and the lost
    workers; None on others.

    out: returns the run directory; called on rank 0 only. on_metrics, on_notice: called on rank 0. Errors as in
    `launch`, on every rank.
    """
    rank, size, join = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), config.world.join_deadline
    with failing_as(f"process {rank} of {size}: not all have come within {join:g} s (world.join_deadline)"):
        store = dist.PrefixStore(attempt(), next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=join))))[0])
    try:
        with scratch() as folder:
            node_spec = _node_spec(rank, size, store, folder / "credentials")
            if rank == 0:
                return _lead(config, out(), on_metrics, on_notice, resume, node_spec, store)
            _follow(config, on_notice, resume, node_spec, store)
            return None
    finally:
        mesh.leave()


def _node_spec(rank: int, size: int, store: dist.Store, folder: Path) -> NodeSpec:
    """This process as a node; rank 0 sends the rendezvous address and the token to the others over torchrun's store.
    folder: for rank 0's credentials.
    """
    if size == 1:
        return NodeSpec(shared_directory=True)
    if rank == 0:
        host = "127.0.0.1" if _one_machine() else own_address(os.environ["MASTER_ADDR"], "MASTER_ADDR")
        with listen(0, host) as free:
            store.set("isles/rendezvous", written(host, free.getsockname()[1]))
        store.set("isles/token", str(credentials.found(folder).token))
    return NodeSpec(
        nodes=size,
        node=rank,
        rendezvous=store.get("isles/rendezvous").decode(),
        shared_directory=True,
        token=parse_token(store.get("isles/token").decode()),
        credentials=folder if rank == 0 else None,
    )


def _lead(
    config: Config,
    out: Path,
    on_metrics: Callable[[dict[str, Any]], None],
    on_notice: Callable[[str], None],
    resume: int | None,
    node_spec: NodeSpec,
    store: dist.Store,
) -> tuple[Path, SummaryTable, tuple[int, ...]]:
    begun: SimpleQueue[tuple[Workers, int | None, NodeGroup] | None] = SimpleQueue()
    ours, theirs = Pipe()
    ended: list[SummaryTable | BaseException] = []

    def start_workers(config: Config, out: Path, resume: int | None, node_group: NodeGroup) -> Workers:
        workers = config.world.workers
        # Before `go`, on which the others look for it.
        store.set("isles/out", str(out))
        node_group.go()
        others = node_handles(node_group, workers, Schema(config))
        pool = Workers(workers, [PipeHandle(0, ours), *others], lambda patience: None)
        begun.put((pool, resume, node_group))
        return pool

    def work() -> None:
        try:
            ended.append(launch(config, out, on_metrics, on_notice, resume, node_spec, start_workers))
        except BaseException as error:  # raised again in the main thread
            ended.append(error)
        begun.put(None)  # also if the launcher failed before it started workers: the main thread waits for one of both

    thread = threading.Thread(target=work, name="isles-launcher", daemon=True)
    thread.start()
    lost: Sequence[int] = ()
    before: dict[signal.Signals, Any] = {}
    if (start := begun.get()) is not None:
        pool, step, node_group = start
        lost = pool.failures  # filled while the run goes on
        # If a worker dies, torchrun ends the others by SIGTERM, and by SIGKILL after half a minute. This process still
        # has to report the error, so it ignores these signals until its end.
        before = {number: signal.signal(number, lambda *_: None) for number in _OF_SCHEDULERS}
        _attend(_PipeToLauncher(theirs, pool), config, out, step, node_group, store)
    thread.join()
    if isinstance(ended[0], BaseException):
        raise ended[0]
    for number, handler in before.items():
        signal.signal(number, handler)
    return out, ended[0], tuple(lost)


def _follow(
    config: Config, on_notice: Callable[[str], None], resume: int | None, node_spec: NodeSpec, store: dist.Store
) -> None:
    with meet_nodes(config, node_spec, Path(), resume, on_notice) as node_group:
        launcher = _LinkToLauncher(node_group.links[0], node_spec.node)
        out = Path(store.get("isles/out").decode())
        with checks_host_messages():
            step = begun(node_group.facts, config)
        _attend(launcher, config, out, step, node_group, store)
        await_outcome(launcher.link)


def _attend(
    launcher: _PipeToLauncher | _LinkToLauncher,
    config: Config,
    out: Path,
    resume: int | None,
    node_group: NodeGroup,
    store: dist.Store,
) -> None:
    """Run the worker in this thread. Ctrl-C and schedulers' signals ask all workers to stop after a common step."""
    spec = WorkerSpec(
        rank=node_group.spec.node,
        size=node_group.spec.nodes,
        local_rank=int(os.environ.get("LOCAL_RANK", node_group.spec.node)),
        host=node_group.host,
        port=0,
        threads=config.world.start_threads,
        interface=loopback() if _one_machine() else interface_of(node_group.here),
        deadlines=deadlines(config),
    )

    def asked(*_: object) -> None:
        if launcher.closed:
            raise _Closed
        launcher.stop()

    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, *_OF_SCHEDULERS)}
    try:
        attend(spec, launcher, lambda: store, train_process, (config, out, resume))
    except _Closed:
        pass  # the launcher's error says why
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _one_machine() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


class _Closed(KeyboardInterrupt):
    """The run was ended while this worker was training."""


class _ToLauncher:
    """The worker's connection to rank 0's launcher, as in `isles.launch.worker`. It interrupts the worker's thread when
    the run is closed.
    """

    def __init__(self) -> None:
        self.closed = False
        self._finished = False

    def outgoing(self, message: tuple[str, Any]) -> tuple[str, Any]:
        """Note whether the worker has ended; print a report of several lines here, as only its last line is sent."""
        kind, value = message
        self._finished = self._finished or kind in ("done", "error")
        if isinstance(value, WorkerFailed) and "\n" in value.report:
            print(value.report, file=sys.stderr, flush=True)
            value = WorkerFailed(value.rank, value.report.splitlines()[-1])
        return kind, value

    def incoming(self, command: Any) -> Any:
        if command == "close" and not self._finished:
            self.closed = True  # before the signal, whose handler looks at it
            signal.pthread_kill(cast(int, threading.main_thread().ident), signal.SIGINT)
        return command


class _PipeToLauncher(_ToLauncher):
    """The connection on rank 0."""

    def __init__(self, pipe: Connection, pool: Workers) -> None:
        super().__init__()
        self.pipe, self.stop = pipe, pool.stop

    def send(self, message: tuple[str, Any]) -> None:
        self.pipe.send(self.outgoing(message))

    def recv(self) -> Any:
        return self.incoming(self.pipe.recv())


class _LinkToLauncher(_ToLauncher):
    """The connection on other ranks."""

    def __init__(self, link: Link, rank: int) -> None:
        super().__init__()
        self.link, self.rank = link, rank
        self._stop_wanted = False

    def stop(self) -> None:
        """Ask rank 0 to stop the run. The receiving thread sends it, as a signal may arrive during a send."""
        self._stop_wanted = True

    def send(self, message: tuple[str, Any]) -> None:
        kind, value = self.outgoing(message)
        try:
            self.link.send([self.rank, kind, to_plain(value) if kind == "error" else value])
        except LinkLost as error:
            raise OSError(str(error)) from error

    def recv(self) -> Any:
        try:
            while (command := order(self._next())) is None:
                pass  # a command for launchers only
        except LinkLost as error:
            raise EOFError(str(error)) from error
        return self.incoming(command)

    def _next(self) -> Any:
        while (message := self.link.next()) is None:
            if self._stop_wanted:
                # Cleared before it is sent: a second signal asks once more.
                self._stop_wanted = False
                self.link.send([-1, "interrupt", None])
            self.link.wait(_GLANCE)
        return message
