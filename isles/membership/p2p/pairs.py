"""Connections between workers: which of the two dials, and how they authenticate each other.

    direct     the sender dials, if the lighthouse knows the other worker's address; or the other worker dials the
               sender, if the sender is the reachable one
    relayed    both dial a worker that relays, or else the lighthouse, with the same ticket, which joins the two
               connections

The lighthouse vouches for the certificate of each worker by its fingerprint, which the dialler compares. It also gives
the dialler a peer key; both ends prove inside TLS that they know it. The lighthouse's replies are cached, so two
workers that were connected do not need it again. `KnownMembers` compares the certificates on connections with the
fingerprints in views. A notice reports whether a peer is reached directly or relayed.
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
    """Fingerprints of members: those that views name, and those seen on connections.

    member, identity: this worker's. refused: counts mismatches. notice: called with a line for the user.
    """

    def __init__(self, member: int, identity: str, refused: Rejections, notice: Callable[[str], None]) -> None:
        # The lock: views come in the session's thread, connections in threads of their own. Notices are outside of it.
        self._refused, self._notice, self._lock = refused, notice, threading.Lock()
        self._in_views: dict[int, str] = {}  # fingerprints in views
        self._shown_by = {member: identity}  # fingerprints on connections, and this worker's own
        self._warned: set[tuple[int, str]] = set()

    def meet(self, view: View) -> list[int]:
        """Record a view's fingerprints. Returns members whose connection has shown another fingerprint."""
        others = list[int]()
        for member, identity in zip(view.members, view.identities, strict=False):
            with self._lock:
                self._in_views[member] = identity
                met = self._shown_by.get(member, identity)
                if met != identity:
                    del self._shown_by[member]
            if met != identity:
                self._report_mismatch(member, met, identity)
                others.append(member)
        return others

    def check(self, member: int, identity: str) -> None:
        """Check the fingerprint that a connection of `member` shows. LinkLost if views name another one."""
        with self._lock:
            named = self._in_views.get(member, identity)
            if named == identity:
                self._shown_by[member] = identity
        if named != identity:
            self._report_mismatch(member, identity, named)
            raise LinkLost("views name another fingerprint")

    def spoken(self, member: int) -> str:
        """The short fingerprint of the connection with `member`."""
        return spoken(self._shown_by.get(member, ""))

    def _report_mismatch(self, member: int, identity: str, named: str) -> None:
        why = f"its fingerprint is {spoken(identity)}, but views name {spoken(named)}"
        self._refused.note(member, why)
        if (member, identity) not in self._warned:
            self._warned.add((member, identity))
            self._notice(f"warning: worker {member} is not who the lighthouse says: {why}")


class PairListener(EchoServer):
    """Listens at host:port for other workers; port 0: any free one.

    welcome: called in a thread of its own with each connection of a worker; other connections get the echo by which the
    lighthouse checks that `name` can be reached. tickets: of a worker that relays. ValueError if the address cannot be
    bound.
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
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it
            raise
        return True


_TRIED = 20.0  # seconds for the lighthouse's reply, during which it dials the announced address
_DIAL = 3.0  # seconds to dial a worker
_CALL = 5.0  # seconds until a worker that was asked to dial has done so
_TICKET = 8.0  # seconds until both ends have met at the lighthouse; at a worker that relays: _DIAL
_LOOK = 30.0  # seconds until an unreachable worker is dialled again
_AT_ONCE = 16  # the most dials at others' request in progress: each has a thread
_REQUEST = struct.Struct(f"<qHBq{TICKET_SIZE}s")
_LIGHTHOUSE = -1
_ASKS = b"isles dials\0"
_MEMBERS = 1 << 20  # member ids below it are possible


class PeerConnections:
    """Makes the connections of the worker of `entry`; also the `PeerKeys` of its state transfers.

    ask: sends a request to the lighthouse, as `MembershipClient.ask`. mine: this worker's key and certificate. lease:
    seconds of silence after which a connection counts as broken. notice: called with a line for the user. island_rank:
    this worker's rank in its island; it connects with the workers of the same rank in other islands. certificates:
    fingerprints of its whole island.

    seen: the address under which the lighthouse sees this worker.
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
        self._ways: dict[int, str] = {}  # by member: "direct" or "relayed ...", as last reported
        self._unreached: dict[int, float] = {}  # by member: when a direct dial last failed
        self._dialling = threading.Semaphore(_AT_ONCE)
        self._incoming: dict[tuple[int, int], list[ssl.SSLSocket]] = {}  # (member, lane): dialled by it, to send on
        self._awaits: set[tuple[int, int]] = set()
        self._changed = threading.Condition()  # guards the two above, and wakes a sender that waits to be dialled
        self._up_changes: list[bool] = []  # the lighthouse's up and down events since the last announcement
        self._closed = False

    def listen(self, host: str, port: int, *, announced: str = "", relays: bool = False) -> None:
        """Listen on port `port` of this machine's address `host`, and announce it to the lighthouse.

        announced: the address for others; "": the one from which the lighthouse sees this machine. relays: whether this
        worker relays for others. A notice says whether the lighthouse can reach it. ValueError if the address cannot be
        bound.
        """
        tickets = TicketExchange(self._entry.key.encode("ascii"), self._count_relayed) if relays else None
        self._listener = PairListener(host, port, self._mine.token.fingerprint, self._welcome, tickets)
        self._announced, self._relays = announced, relays
        self._announce()

    def start(self, transport: ElasticTransport) -> None:
        """Hand connections to `transport` from now on."""
        self._transport = transport
        # Serve first, appear last: whoever sees this worker may ask it to dial at once.
        self._session.serve(self._key(self._entry.member), self._on_dial_request)
        if self._listener is None:
            self._announce()
        self._session.watch(UP, self._on_up_change)
        transport.open()

    def close(self) -> None:
        """Stop listening, and cancel waiting dials. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._listener is not None:
            self._listener.close()

    def meet(self, view: View) -> None:
        """Record the fingerprints of `view`, and cut connections that have shown other ones."""
        for member in self._known.meet(view):
            if self._transport is not None:
                self._transport.cut(member)

    # Asked by state transfers (`PeerKeys`)

    def peer_key(self, peer: int) -> bytes | None:
        """The key for messages to `peer`; None if the lighthouse does not give it. Waits for its reply."""
        address = self._found.get(peer) or self._find(peer)
        return None if address is None else bytes.fromhex(address.peer_key)

    def expected(self, sender: int) -> bytes:
        """The key with which messages of `sender` must be authenticated."""
        return peer_key(self._entry.key, sender)

    # Asked by the transport

    def connect(self, peer: int, lane: int, *, soon: bool) -> Stream | None:
        """A connection to send to `peer` on. None if it would be relayed and nothing is to be sent `soon`. LinkLost if
        `peer` is not reached.
        """
        if self._closed:
            raise LinkLost("this worker has ended")
        address = self._find(peer)
        if address is None:
            raise LinkLost("the lighthouse does not say where it is")
        self._known.check(peer, identity_of(address.certificates))
        link = self._connect_directly(peer, lane, address)
        if link is not None:
            return self._stream(peer, lane, link, "direct")
        if not soon:
            return None
        try:
            return self._stream(peer, lane, *self._connect_relayed(peer, lane, address))
        except OSError as error:
            raise LinkLost(str(error)) from None

    def _stream(self, peer: int, lane: int, link: ssl.SSLSocket, way: str) -> Stream:
        if self._ways.get(peer) != way:
            self._ways[peer] = way
            self._notice(f"worker {peer}: {way}, fingerprint {self._known.spoken(peer)}")
        return Stream(link, way, self._lease, lane)

    def _connect_directly(self, peer: int, lane: int, address: PeerAddress) -> ssl.SSLSocket | None:
        if time.monotonic() - self._unreached.get(peer, -_LOOK) < _LOOK:
            return None
        try:
            if address.host and self._is_near(address.host):
                return self._dial(lane, address, sends=True)
        except (OSError, LinkLost):
            self._unreached[peer] = time.monotonic()
        try:
            return self._ask_to_dial(peer, lane, address) if self._listens else None
        except LinkLost:
            self._unreached[peer] = time.monotonic()
        return None

    def _dial(self, lane: int, address: PeerAddress, *, sends: bool) -> ssl.SSLSocket:
        link = tuned(socket.create_connection((address.host, address.port), _DIAL))
        link.sendall(PAIR)
        return self._shown(link, lane, address, sends=sends)

    def _ask_to_dial(self, peer: int, lane: int, address: PeerAddress) -> ssl.SSLSocket:
        """Ask `peer` to dial this worker, and wait for it."""
        with self._changed:
            # Before the request: `peer` may have dialled before its reply arrives.
            self._awaits.add((peer, lane))
        try:
            self._request_dial(peer, lane, address, _LIGHTHOUSE, bytes(TICKET_SIZE))
            with self._changed:
                self._changed.wait_for(lambda: self._incoming.get((peer, lane)) or self._closed, _CALL)
                if came := self._incoming.get((peer, lane)):
                    return came.pop()
            raise LinkLost("it did not dial")
        finally:
            with self._changed:
                self._awaits.discard((peer, lane))
                unused = self._incoming.pop((peer, lane), [])
            for link in unused:  # it dialled more than once, or after the wait
                link.close()

    def _connect_relayed(self, peer: int, lane: int, address: PeerAddress) -> tuple[ssl.SSLSocket, str]:
        """A relayed connection, and a text that names the relay."""
        if address.relay >= 0:
            with suppress(OSError, LinkLost, ValueError):  # then the lighthouse relays
                link = self._connect_by_ticket(peer, lane, address, address.relay, bytes.fromhex(address.ticket))
                return link, f"relayed by worker {address.relay}"
        ticket, _ = self._session.answer(RELAY_TICKETS, b"", seconds=_CALL, urgent=True)
        if not ticket or len(ticket) != TICKET_SIZE:
            raise LinkLost("the lighthouse does not answer")
        return self._connect_by_ticket(peer, lane, address, _LIGHTHOUSE, ticket), "relayed"

    def _connect_by_ticket(
        self, peer: int, lane: int, address: PeerAddress, relay: int, ticket: bytes
    ) -> ssl.SSLSocket:
        self._request_dial(peer, lane, address, relay, ticket)
        return self._shown(self._meet(relay, ticket), lane, address, sends=True)

    def _meet(self, relay: int, ticket: bytes) -> socket.socket:
        """Show a ticket to the relaying member, or to the lighthouse (-1); returns the joined connection."""
        if relay < 0:
            return tuned(self._session.connect_by_ticket(ticket, _TICKET))
        there = self._find(relay)
        if there is None or not there.host:
            raise LinkLost("the relaying worker is not reached")
        return tuned(self._session.connect_by_ticket(ticket, _DIAL, (there.host, there.port)))

    def _shown(self, link: socket.socket, lane: int, address: PeerAddress, *, sends: bool) -> ssl.SSLSocket:
        host = address.certificates[self._island_rank]
        tls = as_dialler(
            link, Token(host, address.peer_key), PairHello(self._entry.member, self._island_rank, sends, lane)
        )
        show(tls, self._mine, self._shows, host)
        return tls

    def _request_dial(self, peer: int, lane: int, address: PeerAddress, relay: int, ticket: bytes) -> None:
        """Ask `peer` to dial this worker, or with a ticket the relay. LinkLost if it does not answer."""
        payload = _REQUEST.pack(self._entry.member, self._island_rank, lane, relay, ticket)
        proof = authenticate(bytes.fromhex(address.peer_key), _ASKS, payload)
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
        """Whether `host` means the same machine here as at the lighthouse: a loopback address does not elsewhere."""
        with suppress(ValueError):  # a host name
            return not ipaddress.ip_address(host).is_loopback or self._session.is_local()
        return True

    def _key(self, member: int) -> str:
        room = "isles" if not self._island_rank else f"isles/rank/{self._island_rank}"
        return f"{room}/dial/{member}"

    # Asked by other workers

    def _on_dial_request(self, query: Query) -> None:
        """Another worker asks to be dialled. Runs in the session's thread, so the dialling is left to a thread."""
        note = self._session.refused.note
        if len(query.payload) != _REQUEST.size:
            note(-1, "no message of this library")
            query.refuse(b"never")
            return
        member, island_rank, lane, relay, ticket = _REQUEST.unpack(query.payload)
        if not 0 <= member < _MEMBERS or island_rank != self._island_rank or not _LIGHTHOUSE <= relay < _MEMBERS:
            note(-1, "a message of an impossible member")
            query.refuse(b"later")
        elif not hmac.compare_digest(query.attachment, authenticate(self.expected(member), _ASKS, query.payload)):
            note(-1, "a message in another's name")
            query.refuse(b"never")
        # Never waits: this is the thread of all of the session's callbacks.
        elif not self._dialling.acquire(blocking=False):
            query.refuse(b"later")
        else:
            query.reply()
            threading.Thread(
                target=self._dial_back, args=(member, lane, relay, ticket), name=f"isles-dials-{member}", daemon=True
            ).start()

    def _dial_back(self, member: int, lane: int, relay: int, ticket: bytes) -> None:
        try:
            with suppress(OSError, LinkLost):  # the asker gives up after _CALL seconds, and tries another way
                if ticket != bytes(TICKET_SIZE):
                    tls, hello = self._authenticate(self._meet(relay, ticket), member)
                    self._take(hello, tls, "relayed")
                elif (address := self._find(member)) is not None and address.host:
                    hello = PairHello(member, self._island_rank, True, lane)
                    self._take(hello, self._dial(lane, address, sends=False), "direct")
        finally:
            self._dialling.release()

    def _welcome(self, connection: socket.socket) -> None:
        """Accept a connection that another worker has dialled. LinkLost if it is not authenticated."""
        tls, hello = self._authenticate(tuned(connection))
        if hello.sends:
            self._take(hello, tls, "direct")
            return
        with self._changed:
            if (hello.member, hello.lane) in self._awaits:
                self._incoming.setdefault((hello.member, hello.lane), []).append(tls)
                self._changed.notify_all()
                return
        tls.close()

    def _authenticate(self, link: socket.socket, member: int | None = None) -> tuple[ssl.SSLSocket, PairHello]:
        """Authenticate a dialler, as `member` if that is agreed. LinkLost if it fails."""
        tls, hello = as_host(link, self._mine, lambda hello: self._token_of(hello, member))
        try:
            self._known.check(hello.member, shown(tls, self._mine.token.fingerprint, self._island_rank))
        except LinkLost:
            tls.close()
            raise
        return tls, hello

    def _token_of(self, hello: PairHello, member: int | None = None) -> Token:
        """The token that a dialler must prove to know, as the member that it claims to be."""
        if (
            hello.island_rank != self._island_rank
            or not 0 <= hello.member < _MEMBERS
            or member not in (None, hello.member)
        ):
            raise LinkLost("it is not the member that was asked")
        return Token(self._mine.token.fingerprint, self.expected(hello.member).hex())

    def _take(self, hello: PairHello, tls: ssl.SSLSocket, way: str) -> None:
        if self._transport is None or self._closed:
            tls.close()
        else:
            self._transport.take(hello.member, Stream(tls, way, self._lease, hello.lane))

    def _count_relayed(self, size: int) -> None:
        if self._transport is not None:
            self._transport.carries(size)

    # Reported to the lighthouse

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
        """Announce again after a restart of the lighthouse, which has forgotten this worker's address."""
        self._up_changes.append(there)
        if self._up_changes[2:]:  # up, down, up
            del self._up_changes[1:]
            self._session.aside(self._announce)
