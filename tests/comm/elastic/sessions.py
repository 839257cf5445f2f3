"""Real sessions on loopback: a lighthouse's router and workers in threads of this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from isles.comm import credentials, mesh
from isles.comm.credentials import Credentials
from isles.comm.elastic.session import Mode, Session, open_session
from isles.comm.elastic.transport import ElasticTransport


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def router(folder: Path) -> Iterator[tuple[Credentials, str, Session]]:
    """The credentials of a new run, where its router listens, and the router's session."""
    mine = credentials.found(folder / "credentials")
    address = f"127.0.0.1:{free_port()}"
    session = open_session("router", mine, listen=address)
    try:
        yield mine, address, session
    finally:
        session.close()


@contextmanager
def workers(folder: Path, count: int, mode: Mode = "client", lease: float = 3.0) -> Iterator[list[ElasticTransport]]:
    """Transports of seats 0 .. count - 1 that see each other."""
    with router(folder) as (mine, address, _):
        listen = "127.0.0.1:0" if mode == "peer" else None
        sessions = [open_session(mode, mine, listen=listen, connect=address, lease=lease) for _ in range(count)]
        transports = [ElasticTransport(session, seat, count) for seat, session in enumerate(sessions)]
        try:
            yield transports
        finally:
            for transport, session in zip(transports, sessions, strict=True):
                transport.close()
                session.close()


def run_elastic(folder: Path, worker: Callable[..., Any], count: int, *args: Any, mode: Mode = "client") -> list[Any]:
    """`worker(world, *args)` in a thread for each seat; results in their order."""
    results: list[Any] = [None] * count
    with workers(folder, count, mode) as transports:

        def work(transport: ElasticTransport) -> None:
            mesh.enter(transport)
            try:
                results[transport.rank] = worker(mesh.init(), *args)
            except Exception as error:
                results[transport.rank] = error
            finally:
                mesh.leave()

        before = torch.get_num_threads()
        torch.set_num_threads(1)
        threads = [threading.Thread(target=work, args=(transport,)) for transport in transports]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.set_num_threads(before)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def settled(*works: Any, seconds: float = 10.0) -> None:
    """Wait until all works are done. TimeoutError."""
    over = threading.Event()
    for _ in range(round(seconds / 0.005)):
        if all(work.done() for work in works):
            return
        over.wait(0.005)
    raise TimeoutError
