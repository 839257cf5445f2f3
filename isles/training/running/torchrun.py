"""A run whose processes torchrun has started: each is a worker, and rank 0's also does what a launcher does.

rank 0     main thread: worker 0    <--pipe-->    a thread: `launch`, with its metrics, checkpoints and summary
rank k     main thread: worker k    <--line-->    the same thread of rank 0

All write into one run directory, so several machines need a shared file system; without one, use --nodes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

import torch.distributed as dist

from isles.comm import mesh
from isles.comm.errors import WorkerFailed, from_plain, to_plain
from isles.launch.link import Line, LineLost, listen
from isles.launch.nodes import Party, Place
from isles.launch.processes import PipeLink
from isles.launch.reachable import interface_of, loopback
from isles.launch.worker import Seat, attend
from isles.launch.workers import Workers, node_links
from isles.training.config.sections import Config
from isles.training.running.agree import met
from isles.training.running.run import Summary, deadlines, launch, train_process

_GLANCE = 0.2  # seconds between looks at whether a stop is wanted
_VERDICT = 60.0  # seconds in which rank 0 writes down how the run ended


def take_part(
    config: Config,
    out: Callable[[], Path],
    on_line: Callable[[dict[str, Any]], None],
    on_notice: Callable[[str], None],
    resume: int | None,
) -> tuple[Path, Summary] | None:
    """Work as the worker that torchrun's environment says; on rank 0 the run directory and the summary in the end.

    out: names the run directory; asked on rank 0 alone. on_line, on_notice: told on rank 0. Errors as in `launch`, on
    every rank.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = next(iter(dist.rendezvous("env://")))[0]
    if rank == 0:
        with listen(0) as free:
            store.set("isles/rendezvous", f"{os.environ['MASTER_ADDR']}:{free.getsockname()[1]}")
    rendezvous = store.get("isles/rendezvous").decode()
    place = Place(nodes=size, node=rank, rendezvous=rendezvous if size > 1 else "", one_folder=True)
    try:
        if rank == 0:
            return _lead(config, out(), on_line, on_notice, resume, place, store)
        _follow(config, on_notice, resume, place, store)
        return None
    finally:
        mesh.leave()


def _lead(
    config: Config,
    out: Path,
    on_line: Callable[[dict[str, Any]], None],
    on_notice: Callable[[str], None],
    resume: int | None,
    place: Place,
    store: dist.Store,
) -> tuple[Path, Summary]:
    begun: SimpleQueue[tuple[Workers, int | None, Party] | None] = SimpleQueue()
    ours, theirs = Pipe()
    ended: list[Summary | BaseException] = []

    def hire(config: Config, out: Path, resume: int | None, party: Party) -> Workers:
        workers = config.world.workers
        party.go(out=str(out))
        pool = Workers(workers, [PipeLink(0, ours), *node_links(party, workers)], lambda patience: None)
        begun.put((pool, resume, party))
        return pool

    def work() -> None:
        try:
            ended.append(launch(config, out, on_line, on_notice, resume, place, hire))
        except BaseException as error:  # raised again in the main thread
            ended.append(error)
        begun.put(None)

    thread = threading.Thread(target=work, name="isles-launcher", daemon=True)
    thread.start()
    if (start := begun.get()) is not None:
        pool, step, party = start
        _attend(_PipeWay(theirs, pool), config, out, step, party, store)
    thread.join()
    if isinstance(ended[0], BaseException):
        raise ended[0]
    return out, ended[0]


def _follow(
    config: Config, on_notice: Callable[[str], None], resume: int | None, place: Place, store: dist.Store
) -> None:
    with met(config, place, Path(), resume, on_notice) as party:
        way = _LineWay(party.lines[0], place.node)
        _attend(way, config, Path(party.facts["out"]), party.facts["resume"], party, store)
        way.hear_how_it_ended()


def _attend(
    way: _PipeWay | _LineWay, config: Config, out: Path, resume: int | None, party: Party, store: dist.Store
) -> None:
    """Work in this thread. Ctrl-C, and torchrun's SIGTERM, ask all workers to stop after a common step."""
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    seat = Seat(
        rank=party.node,
        size=party.nodes,
        local_rank=int(os.environ.get("LOCAL_RANK", party.node)),
        host=party.host,
        port=0,
        threads=config.world.threads,
        interface=loopback() if one_machine else interface_of(party.here),
        deadlines=deadlines(config),
    )

    def asked(*_: object) -> None:
        if way.closed:
            raise _Closed
        way.stop()

    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        attend(seat, way, lambda: store, train_process, (config, out, resume))
    except _Closed:
        pass  # whoever called hears why
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Closed(KeyboardInterrupt):
    """The run was ended while this worker was at work."""


class _Way:
    """The worker's way to rank 0's launcher; a Channel of `isles.launch.worker`. It wakes up a worker whose run is
    over.
    """

    def __init__(self) -> None:
        self.closed = False
        self._finished = False

    def said(self, message: tuple[str, Any]) -> tuple[str, Any]:
        """Note what the worker says, and print what is too long for a line."""
        kind, value = message
        self._finished = self._finished or kind in ("done", "error")
        if isinstance(value, WorkerFailed) and "\n" in value.report:
            print(value.report, file=sys.stderr, flush=True)
            value = WorkerFailed(value.rank, value.report.splitlines()[-1])
        return kind, value

    def heard(self, order: Any) -> Any:
        """Note what the launcher says."""
        if order == "close" and not self._finished:
            self.closed = True
            signal.pthread_kill(cast(int, threading.main_thread().ident), signal.SIGINT)
        return order


class _PipeWay(_Way):
    """On rank 0."""

    def __init__(self, pipe: Connection, pool: Workers) -> None:
        super().__init__()
        self.pipe, self.stop = pipe, pool.stop

    def send(self, message: tuple[str, Any]) -> None:
        """See Channel."""
        self.pipe.send(self.said(message))

    def recv(self) -> Any:
        """See Channel."""
        return self.heard(self.pipe.recv())


class _LineWay(_Way):
    """On the other ranks."""

    def __init__(self, line: Line, rank: int) -> None:
        super().__init__()
        self.line, self.rank = line, rank
        self._stop_wanted = False
        self._verdict: Any = None

    def stop(self) -> None:
        """Ask rank 0 to stop the run. The thread that listens sends it: a signal may come in the midst of a send."""
        self._stop_wanted = True

    def send(self, message: tuple[str, Any]) -> None:
        """See Channel."""
        kind, value = self.said(message)
        try:
            self.line.send([self.rank, kind, to_plain(value) if kind == "error" else value])
        except LineLost as error:
            raise OSError(str(error)) from error

    def recv(self) -> Any:
        """See Channel."""
        try:
            while not isinstance(order := self._next(), str | list):
                pass  # a word to launchers
        except LineLost as error:
            raise EOFError(str(error)) from error
        return self.heard(order)

    def hear_how_it_ended(self) -> None:
        """Raise the error with which the run ended, if it did."""
        while not isinstance(message := self.line.receive(_VERDICT), dict) or "over" not in message:
            pass
        if message["over"] is not None:
            raise from_plain(message["over"])

    def _next(self) -> Any:
        while (message := self.line.next()) is None:
            if self._stop_wanted:
                self._stop_wanted = False
                self.line.send([-1, "interrupt", None])
            self.line.wait(_GLANCE)
        return message
