"""The connections of one worker to others: who dials whom, and how each knows the other.

    direct     the sender dials, where the lighthouse knows that the other one is reached; or is dialled by it, where it
               is itself
    relayed    both dial a worker that relays for others, else the lighthouse, with one ticket, which makes the two
               connections one

The lighthouse vouches for the certificate of each worker by its fingerprint, which the dialler compares, and gives it
a peer key, the knowledge of which both prove inside TLS. Its answers are cached, so that two who have met go on without
it. `KnownMembers` compares who showed itself with whom views name. Which way a connection goes is reported in a line.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from isles.comm.credentials import Credentials, Token
from isles.comm.sockets.connection import SILENCE, LinkLost
from isles.comm.sockets.listener import MOST, EchoServer, peeked
from isles.comm.tcp import written
from isles.membership.keys import RELAY_TICKETS, UP, authenticate, peer_key
from isles.membership.messages import (
    AnnounceAddress,
    Entry,
    Lookup,
    PeerAddress,
    Reachability,
    View,
    identity_of,
    spoken,
)
from isles.membership.p2p.relay import TicketExchange
from isles.membership.p2p.stream import PAIR, TICKET_SIZE, PairHello, Stream, as_dialler, as_host, show, shown, tuned
from isles.membership.session import Query, Rejections
from isles.membership.tls_session import Session

if TYPE_CHECKING:
    from isles.membership.p2p.transport import ElasticTransport


class KnownMembers:
    """Of the worker in `member`, whose own member is `identity`. notice: called with a line for a person."""

    def __init__(self, member: int, identity: str, refused: Rejections, notice: Callable[[str], None]) -> None:
        self._refused, self._notice, self._lock = refused, notice, threading.Lock()
        self._named: dict[int, str] = {}  # by views
        self._met = {member: identity}  # whoever this worker is or was connected with, and itself
        self._warned: set[tuple[int, str]] = set()

    def meet(self, view: View) -> list[int]:
        """Take in whom `view` names; with which of them somebody else is connected than whom it names."""
        others = list[int]()
        for member, identity in zip(view.members, view.identities, strict=False):
            with self._lock:
                self._named[member] = identity
                met = self._met.get(member, identity)
                if met != identity:
                    del self._met[member]
            if met != identity:
                self._is_another(member, met, identity)
                others.append(member)
        return others

    def check(self, member: int, identity: str) -> None:
        """Whoever says that it is `member` shows this identity. LinkLost where views name another one."""
        with self._lock:
            named = self._named.get(member, identity)
            if named == identity:
                self._met[member] = identity
        if named != identity:
            self._is_another(member, identity, named)
            raise LinkLost("views name somebody else")

    def spoken(self, member: int) -> str:
        """Of whoever this worker is connected with as `member`."""
        return spoken(self._met.get(member, ""))

    def _is_another(self, member: int, identity: str, named: str) -> None:
        why = f"its fingerprint is {spoken(identity)}, and {spoken(named)} where views name it"
        self._refused.note(member, why)
        if (member, identity) not in self._warned:
            self._warned.add((member, identity))
            self._notice(f"warning: worker {member} is not who the lighthouse says: {why}")


class PairListener(EchoServer):
    """Listens at host:port for other workers; port 0: any. welcome: called, in a thread of its own, with each that
    begins as one does; others get the echo by which the lighthouse sees that `name` is reached. tickets: of a worker
    that carries for others. ValueError where the address cannot be had.
    """

    def __init__(
        self,
        host: str,
        port: int,
        name: str,
        welcome: Callable[[socket.socket], object],
        tickets: TicketExchange | None = None,
    ) -> None:
        self._welcome, self._tickets = welcome, tickets
        self._threads = ThreadPoolExecutor(MOST, "isles-welcomes")
        super().__init__(host, port, name, SILENCE, self._attends)

    def close(self) -> None:
        """Stop listening."""
        self.__exit__()
        if self._tickets is not None:
            self._tickets.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _attends(self, connection: socket.socket) -> bool:
        if self._tickets is not None and await self._tickets.take(connection):
            return True
        if not await peeked(connection, PAIR):
            return False
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._welcome, connection)
        except BaseException:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # its thread waits for nothing any more
            raise
        return True


_TRIED = 20.0  # seconds for the lighthouse's answer, which tries the address meanwhile
_DIAL = 3.0  # seconds that a worker is dialled for
_CALL = 5.0  # seconds until one that was asked to dial has
_TICKET = 8.0  # seconds until the other one has come to the lighthouse; to a worker that carries: _DIAL
_LOOK = 30.0  # seconds until one that was not reached is dialled again
_AT_ONCE = 16  # others that this worker dials because they have asked
_REQUEST = struct.Struct(f"<qHBq{TICKET_SIZE}s")
_LIGHTHOUSE = -1
_ASKS = b"isles dials\0"
_MEMBERS = 1 << 20


class PeerConnections:
    """Of the worker in the member of `entry`; the `PeerKeys` of what it gives and takes.

    ask: asks the lighthouse, as `MembershipClient.ask`. mine: this worker's key and certificate. lease: seconds of
    silence after which a connection counts as broken. notice: called with a line for a person. island_rank: this
    worker's in its island; it is connected with the workers of the same rank in other islands. certificates:
    fingerprints of its whole island.

    seen: the address from which the lighthouse sees this worker.
    """

    def __init__(
        self,
        session: Session,
        entry: Entry,
        ask: Callable[..., Any],
        mine: Credentials,
        *,
        lease: float,
        notice: Callable[[str], None],
        island_rank: int = 0,
        certificates: Sequence[str] = (),
    ) -> None:
        self._session, self._entry, self._ask, self._island_rank = session, entry, ask, island_rank
        self._lease, self._notice = lease, notice
        self._mine, self._shows = mine, certificates or (mine.token.fingerprint,)
        self.seen = ""
        self._known = KnownMembers(entry.member, identity_of(self._shows), session.refused, notice)
        self._transport: ElasticTransport | None = None
        self._listener: PairListener | None = None
        self._listens, self._announced, self._relays = False, "", False
        self._found: dict[int, PeerAddress] = {}
        self._ways: dict[int, str] = {}  # what was said of each
        self._unreached: dict[int, float] = {}  # since when
        self._dialling = threading.Semaphore(_AT_ONCE)
        self._incoming: dict[tuple[int, int], list[ssl.SSLSocket]] = {}  # by (member, lane): this worker is to send
        self._awaits: set[tuple[int, int]] = set()
        self._changed = threading.Condition()
        self._up_changes: list[bool] = []  # how the lighthouse came and went since it knows where this worker is
        self._closed = False

    def listen(self, host: str, port: int, *, announced: str = "", relays: bool = False) -> None:
        """Be reached at port `port` of this machine's address `host`; announced: the address for others, "" where the
        lighthouse sees this machine. relays: carry for others. Says whether the lighthouse reaches it. ValueError where
        the address cannot be had.
        """
        tickets = TicketExchange(self._entry.key.encode("ascii"), self._carried) if relays else None
        self._listener = PairListener(host, port, self._mine.token.fingerprint, self._welcome, tickets)
        self._announced, self._relays = announced, relays
        self._announce()

    def start(self, transport: ElasticTransport) -> None:
        """Bring others to `transport` from now on."""
        self._transport = transport
        self._session.serve(self._key(self._entry.member), self._asked)
        if self._listener is None:
            self._announce()
        self._session.watch(UP, self._on_up_change)
        transport.open()

    def close(self) -> None:
        """End what is under way. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._listener is not None:
            self._listener.close()

    def meet(self, view: View) -> None:
        """`view` names members: whoever is connected with this worker as one of them, and is not, is cut off."""
        for member in self._known.meet(view):
            if self._transport is not None:
                self._transport.cut(member)

    # What gifts ask (`PeerKeys`)

    def peer_key(self, peer: int) -> bytes | None:
        """By which a message to `peer` is sealed; None while the lighthouse does not say. Waits for its answer."""
        found = self._found.get(peer) or self._find(peer)
        return None if found is None else bytes.fromhex(found.peer_key)

    def expected(self, sender: int) -> bytes:
        """By which a message of `sender` must be sealed."""
        return peer_key(self._entry.key, sender)

    # What the transport asks

    def connect(self, peer: int, lane: int, *, soon: bool) -> Stream | None:
        """That connection to send to `peer` on; None where it would be relayed and nothing is to be sent `soon`.
        LinkLost where it is not reached.
        """
        if self._closed:
            raise LinkLost("this worker has ended")
        found = self._find(peer)
        if found is None:
            raise LinkLost("the lighthouse does not say where it is")
        self._known.check(peer, identity_of(found.certificates))
        link = self._directly(peer, lane, found)
        if link is not None:
            return self._stream(peer, lane, link, "direct")
        if not soon:
            return None
        try:
            return self._stream(peer, lane, *self._relayed(peer, lane, found))
        except OSError as error:
            raise LinkLost(str(error)) from None

    def _stream(self, peer: int, lane: int, link: ssl.SSLSocket, way: str) -> Stream:
        if self._ways.get(peer) != way:
            self._ways[peer] = way
            self._notice(f"worker {peer}: {way}, fingerprint {self._known.spoken(peer)}")
        return Stream(link, way, self._lease, lane)

    def _directly(self, peer: int, lane: int, found: PeerAddress) -> ssl.SSLSocket | None:
        if time.monotonic() - self._unreached.get(peer, -_LOOK) < _LOOK:
            return None
        try:
            if found.host and self._is_near(found.host):
                return self._dial(lane, found, sends=True)
        except (OSError, LinkLost):
            self._unreached[peer] = time.monotonic()
        try:
            return self._dialled(peer, lane, found) if self._listens else None
        except LinkLost:
            self._unreached[peer] = time.monotonic()
        return None

    def _dial(self, lane: int, found: PeerAddress, *, sends: bool) -> ssl.SSLSocket:
        link = tuned(socket.create_connection((found.host, found.port), _DIAL))
        link.sendall(PAIR)
        return self._shown(link, lane, found, sends=sends)

    def _dialled(self, peer: int, lane: int, found: PeerAddress) -> ssl.SSLSocket:
        """Dialled by `peer`, which is asked to."""
        with self._changed:
            self._awaits.add((peer, lane))
        try:
            self._call(peer, lane, found, _LIGHTHOUSE, bytes(TICKET_SIZE))
            with self._changed:
                self._changed.wait_for(lambda: self._incoming.get((peer, lane)) or self._closed, _CALL)
                if came := self._incoming.pop((peer, lane), []):
                    return came[-1]
            raise LinkLost("it did not come")
        finally:
            with self._changed:
                self._awaits.discard((peer, lane))

    def _relayed(self, peer: int, lane: int, found: PeerAddress) -> tuple[ssl.SSLSocket, str]:
        """And by whom, in words."""
        if found.relay >= 0:
            with suppress(OSError, LinkLost, ValueError):
                link = self._connect_by_ticket(peer, lane, found, found.relay, bytes.fromhex(found.ticket))
                return link, f"relayed by worker {found.relay}"
        ticket, _ = self._session.answer(RELAY_TICKETS, b"", seconds=_CALL, urgent=True)
        if not ticket or len(ticket) != TICKET_SIZE:
            raise LinkLost("the lighthouse does not answer")
        return self._connect_by_ticket(peer, lane, found, _LIGHTHOUSE, ticket), "relayed"

    def _connect_by_ticket(self, peer: int, lane: int, found: PeerAddress, relay: int, ticket: bytes) -> ssl.SSLSocket:
        self._call(peer, lane, found, relay, ticket)
        return self._shown(self._meet(relay, ticket), lane, found, sends=True)

    def _meet(self, relay: int, ticket: bytes) -> socket.socket:
        """The connection to whoever comes with the same ticket to the worker of that member, or the lighthouse."""
        if relay < 0:
            return tuned(self._session.connect_by_ticket(ticket, _TICKET))
        there = self._find(relay)
        if there is None or not there.host:
            raise LinkLost("who was to carry is not reached")
        return tuned(self._session.connect_by_ticket(ticket, _DIAL, (there.host, there.port)))

    def _shown(self, link: socket.socket, lane: int, found: PeerAddress, *, sends: bool) -> ssl.SSLSocket:
        host = found.certificates[self._island_rank]
        tls = as_dialler(
            link, Token(host, found.peer_key), PairHello(self._entry.member, self._island_rank, sends, lane)
        )
        show(tls, self._mine, self._shows, host)
        return tls

    def _call(self, peer: int, lane: int, found: PeerAddress, relay: int, ticket: bytes) -> None:
        """Have `peer` dial this worker, or with a ticket who carries for both. LinkLost where it does not answer."""
        payload = _REQUEST.pack(self._entry.member, self._island_rank, lane, relay, ticket)
        proof = authenticate(bytes.fromhex(found.peer_key), _ASKS, payload)
        try:
            reply, _ = self._session.answer(self._key(peer), payload, attachment=proof, seconds=_CALL, urgent=True)
        except OSError as error:
            raise LinkLost(str(error)) from None
        if reply is None:
            raise LinkLost("it does not answer")

    def _find(self, member: int) -> PeerAddress | None:
        answer = self._ask(Lookup(member, self._island_rank))
        if isinstance(answer, PeerAddress) and answer.member == member and len(answer.certificates) > self._island_rank:
            self._found[member] = answer
        return self._found.get(member)

    def _is_near(self, host: str) -> bool:
        """Whether `host` is the same machine here as for the lighthouse: a loopback address is everybody's own."""
        with suppress(ValueError):
            return not ipaddress.ip_address(host).is_loopback or self._session.is_local()
        return True

    def _key(self, member: int) -> str:
        room = "isles" if not self._island_rank else f"isles/rank/{self._island_rank}"
        return f"{room}/dial/{member}"

    # What others ask

    def _asked(self, query: Query) -> None:
        """Somebody asks to be dialled. In the session's thread."""
        note = self._session.refused.note
        if len(query.payload) != _REQUEST.size:
            note(-1, "no message of this library")
            query.refuse(b"never")
            return
        member, island_rank, lane, relay, ticket = _REQUEST.unpack(query.payload)
        if not 0 <= member < _MEMBERS or island_rank != self._island_rank or not _LIGHTHOUSE <= relay < _MEMBERS:
            note(-1, "a message of nobody who is there")
            query.refuse(b"later")
        elif not hmac.compare_digest(query.attachment, authenticate(self.expected(member), _ASKS, query.payload)):
            note(-1, "a message in another's name")
            query.refuse(b"never")
        elif not self._dialling.acquire(blocking=False):
            query.refuse(b"later")
        else:
            query.reply()
            threading.Thread(
                target=self._go, args=(member, lane, relay, ticket), name=f"isles-dials-{member}", daemon=True
            ).start()

    def _go(self, member: int, lane: int, relay: int, ticket: bytes) -> None:
        try:
            with suppress(OSError, LinkLost):
                if ticket != bytes(TICKET_SIZE):
                    tls, hello = self._let_in(self._meet(relay, ticket), member)
                    self._take(hello, tls, "relayed")
                elif (found := self._find(member)) is not None and found.host:
                    hello = PairHello(member, self._island_rank, True, lane)
                    self._take(hello, self._dial(lane, found, sends=False), "direct")
        finally:
            self._dialling.release()

    def _welcome(self, connection: socket.socket) -> None:
        """Somebody has dialled this worker. LinkLost where it is not let in."""
        tls, hello = self._let_in(tuned(connection))
        if hello.sends:
            self._take(hello, tls, "direct")
            return
        with self._changed:
            if (hello.member, hello.lane) in self._awaits:
                self._incoming.setdefault((hello.member, hello.lane), []).append(tls)
                self._changed.notify_all()
                return
        tls.close()

    def _let_in(self, link: socket.socket, member: int | None = None) -> tuple[ssl.SSLSocket, PairHello]:
        """Whoever dials, as `member` where that was agreed. LinkLost where it is not who it says."""
        tls, hello = as_host(link, self._mine, lambda hello: self._token_of(hello, member))
        try:
            self._known.check(hello.member, shown(tls, self._mine.token.fingerprint, self._island_rank))
        except LinkLost:
            tls.close()
            raise
        return tls, hello

    def _token_of(self, hello: PairHello, member: int | None = None) -> Token:
        """What it must know who says that it is this member."""
        if (
            hello.island_rank != self._island_rank
            or not 0 <= hello.member < _MEMBERS
            or member not in (None, hello.member)
        ):
            raise LinkLost("it is not who was asked")
        return Token(self._mine.token.fingerprint, self.expected(hello.member).hex())

    def _take(self, hello: PairHello, tls: ssl.SSLSocket, way: str) -> None:
        if self._transport is None or self._closed:
            tls.close()
        else:
            self._transport.take(hello.member, Stream(tls, way, self._lease, hello.lane))

    def _carried(self, size: int) -> None:
        if self._transport is not None:
            self._transport.carries(size)

    # What the lighthouse is told

    def _announce(self) -> None:
        port = 0 if self._listener is None else self._listener.port
        payload = AnnounceAddress(
            self._announced if port else "",
            port,
            self._session.name(),
            self._mine.token.fingerprint,
            self._island_rank,
            self._relays,
        )
        answer = self._ask(payload, _TRIED)
        if isinstance(answer, Reachability):
            self.seen = answer.seen
        if not port:
            return
        reached = isinstance(answer, Reachability) and not answer.refusal
        if isinstance(answer, Reachability) and reached != self._listens:
            self._notice(f"others reach this worker directly, at {written(answer.host, answer.port)}")
        elif not reached and not self._listens:
            where = f" of {answer.host} ({answer.refusal})" if isinstance(answer, Reachability) else ""
            self._notice(
                f"warning: relayed: the lighthouse does not reach port {port}{where}; open or forward it, or leave "
                "--listen out"
            )
        self._listens = self._listens or reached

    def _on_up_change(self, _: str, there: bool) -> None:
        """The lighthouse went out, or is lit again and has forgotten where this worker is."""
        self._up_changes.append(there)
        if self._up_changes[2:]:  # there, gone, there
            del self._up_changes[1:]
            self._session.aside(self._announce)
