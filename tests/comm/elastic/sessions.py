"""Real sessions on loopback: a lighthouse's router and workers in threads of this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
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


class Workers(list[ElasticTransport]):
    """By seat, and the router that they meet at."""

    router: Session
    guest: Callable[[], AbstractContextManager[Session]]
    """Opens the session of another one that has the token."""


@contextmanager
def workers(folder: Path, count: int, *, direct: bool = False, lease: float = 3.0) -> Iterator[Workers]:
    """Transports of seats 0 .. count - 1 that see each other. direct: each dials all before it."""
    with router(folder) as (mine, address, session), ExitStack() as stack:

        def opened(mode: Mode, mine: Credentials, **where: str) -> Session:
            session = open_session(mode, mine, lease=lease, **where)  # type: ignore[arg-type]
            stack.callback(session.close)
            return session

        ends = [opened("client", mine, connect=address) for _ in range(count)]
        transports = Workers(ElasticTransport(end, seat, count) for seat, end in enumerate(ends))
        transports.router = session
        transports.guest = lambda: closing(open_session("client", mine, connect=address))
        for transport in transports:
            stack.callback(transport.close)
        for seat, transport in enumerate(transports[: -1 if direct else 0]):
            own, there = credentials.own(mine.token.secret, folder / f"own-{seat}"), f"127.0.0.1:{free_port()}"
            transport.link(opened("router", own, listen=there), None)
            for other in transports[seat + 1 :]:
                other.link(opened("client", own, connect=there), seat)
        yield transports


def run_elastic(folder: Path, worker: Callable[..., Any], count: int, *args: Any, direct: bool = False) -> list[Any]:
    """`worker(world, *args)` in a thread for each seat; results in their order."""
    results: list[Any] = [None] * count
    with workers(folder, count, direct=direct) as transports:

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
