"""Real sessions on loopback: a lighthouse's router and workers in threads of this process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from isles.comm import credentials, mesh
from isles.comm.credentials import Credentials
from isles.membership.keys import MemberKeys
from isles.membership.lighthouse import AddressBook
from isles.membership.messages import Entry, Lookup
from isles.membership.p2p.pairs import PeerConnections
from isles.membership.p2p.transport import ElasticTransport
from isles.membership.tls_session import Session, open_router, open_session

NOBODYS = ("0" * 32,)
"""The certificate of a worker that dials nobody."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def router(folder: Path) -> Iterator[tuple[Credentials, str, Session]]:
    """The credentials of a new run, where its router listens, and the router's session."""
    mine = credentials.found(folder / "credentials")
    address = f"127.0.0.1:{free_port()}"
    session = open_router(mine, address)
    try:
        yield mine, address, session
    finally:
        session.close()


class Workers(list[ElasticTransport]):
    """By member, and the router that they meet at; what connects them, likewise by member."""

    router: Session
    sessions: list[Session]
    pairs: list[PeerConnections]
    known: Known
    guest: Callable[[], AbstractContextManager[Session]]
    """Opens the session of another one that has the token."""


class Known:
    """What a lighthouse says of workers whom it knows. notices: what they tell a person, by member."""

    def __init__(self, folder: Path, router: Session) -> None:
        self.keys = MemberKeys(folder)
        self.notices: dict[int, list[str]] = {}
        self.address_book = AddressBook(self.keys, router.seen)

    def asker(self, member: int) -> Callable[..., Any]:
        """What that member asks it with."""

        def ask(message: Any, seconds: float = 5.0) -> Any:
            if isinstance(message, Lookup):
                return self.address_book.find(member, message)
            answers = SimpleQueue[Any]()
            self.address_book.try_address(member, message, answers.put)
            return answers.get(timeout=10.0)

        return ask

    def pairs(
        self, session: Session, member: int, secret: str, folder: Path, *, lease: float = 3.0, island_rank: int = 0
    ) -> PeerConnections:
        """Of a worker in that member."""
        entry, own = Entry(member, self.keys.of(member)), credentials.own(secret, folder)
        island = tuple(own.token.fingerprint if at == island_rank else "0" * 32 for at in range(island_rank + 1))
        self.address_book.joined(member, island)
        told = self.notices.setdefault(member, [])
        return PeerConnections(
            session,
            entry,
            self.asker(member),
            own,
            lease=lease,
            notice=told.append,
            island_rank=island_rank,
            certificates=island,
        )


@contextmanager
def workers(
    folder: Path, count: int, *, direct: bool = False, lease: float = 3.0, connections: int = 1
) -> Iterator[Workers]:
    """Transports of members 0 .. count - 1 that see each other. direct: all but the last listen."""
    with router(folder) as (mine, address, session), ExitStack() as stack:
        known = Known(folder, session)
        ends = [open_session(mine.token, address) for _ in range(count)]
        for end in ends:
            stack.callback(end.close)
        pairs = [
            known.pairs(end, member, mine.token.secret, folder / f"pairs-{member}", lease=lease)
            for member, end in enumerate(ends)
        ]
        transports = Workers(
            ElasticTransport(end, member, count, peers=pairs[member], connections=connections)
            for member, end in enumerate(ends)
        )
        transports.router, transports.sessions, transports.pairs, transports.known = session, ends, pairs, known
        transports.guest = lambda: closing(open_session(mine.token, address))
        for member, (one, transport) in enumerate(zip(pairs, transports, strict=True)):
            stack.callback(one.close)
            stack.callback(transport.close)
            if direct and member < count - 1:
                one.listen("127.0.0.1", 0)
            one.start(transport)
        yield transports


def vanish(transport: ElasticTransport) -> None:
    """Break all connections of a worker, as when its process is killed."""
    guide = transport._peers
    assert isinstance(guide, PeerConnections)
    guide.close()
    transport._session.close()
    for streams in [*transport._alive.values()]:
        for stream in [*streams]:
            stream.cut()


def run_elastic(folder: Path, worker: Callable[..., Any], count: int, *args: Any, direct: bool = False) -> list[Any]:
    """`worker(world, *args)` in a thread for each member; results in their order."""
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
