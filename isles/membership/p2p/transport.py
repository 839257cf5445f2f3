"""The transport of elastic worlds: messages between members over connections of their own, direct or relayed.

A rank is a member. Each peer has one thread that sends and one that receives, so that a slow peer delays no other. A
message counts as sent once the peer has it. A peer that ends, hangs or is cut off fails only the works with it.

A peer counts as connected while the lighthouse sees it, or while one of the pair's connections is alive, so directly
connected workers go on without the lighthouse. Messages on a connection that breaks are sent again on another one.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import count
from typing import Protocol

import numpy as np
from torch import Tensor
from typing_extensions import override

from isles.comm.errors import PeerLost, RoundClosed
from isles.comm.gloo.transfers import Liveness, OnHostClock, PostedWork
from isles.comm.sockets.connection import LinkLost
from isles.comm.tags import Channel, Tag
from isles.comm.transport import SUSPECT_AFTER, SUSPECT_EVERY, Transport
from isles.membership.messages import MOST, PathRow
from isles.membership.p2p.inbox import ANOTHER, Inbox, before
from isles.membership.p2p.stream import (
    ALIVE,
    CARRIED,
    CHUNK,
    CLOSE_ROUND,
    PIECE,
    REFUSED,
    ROUND_CLOSED,
    TAKEN,
    Head,
    Stream,
)
from isles.membership.session import Rejections
from isles.membership.tls_session import Session

_MEMBER = "member"
_ENDS = 5.0  # seconds for a cut connection's thread to end; its reads fail at once
_LARGE = 1 << 20  # bytes from which a message is spread over the connections of a pair
_FAREWELL = 0.5  # seconds for peers to receive the last acknowledgements
_LOOK = 30.0  # seconds until an idle peer is tried directly again
_AGAIN, _SELDOM = 0.1, 3.0  # seconds until the next attempt to connect: doubled each time, up to the second


MemberLane = tuple[int, int]
"""A member, and the index of one of the connections with it."""


class Connects(Protocol):
    """Makes connections to peers: `PeerConnections`."""

    def connect(self, peer: int, lane: int, *, soon: bool) -> Stream | None: ...


def lost_peer(peer: int, why: str | PeerLost) -> PeerLost:
    """The error of works with `peer`. why: an error, or its text."""
    return PeerLost(peer, why) if isinstance(why, str) else why


class PartedWork:
    """The work of a message in parts: finished with the last part, with the first error. Its buffer is in use till
    then.
    """

    def __init__(self, work: PostedWork, parts: int) -> None:
        self._work, self._left, self._lock = work, parts, threading.Lock()
        self._error: Exception | None = None

    def finished(self, error: Exception | None = None) -> None:
        """One part is finished."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            is_over = not self._left
        if is_over:
            self._work.finished(self._error)


class OutgoingMessage:
    """A part of a message to send: (n,) uint8 `data` for the address `tag`. kind: `PIECE`, or `CLOSE_ROUND` without
    data.
    """

    def __init__(self, work: PartedWork, data: np.ndarray, tag: Tag, kind: int = PIECE) -> None:
        self.work, self.data, self.tag, self.kind = work, data, tag, kind
        self.was_sent = False


class Outgoing:
    """All messages to `peer` on one connection, sent in order by a thread of its own.

    Each message is retained until the peer acknowledges it. If the connection breaks, unacknowledged messages are sent
    again from their first byte on a new one.
    """

    def __init__(self, transport: ElasticTransport, peer: int, lane: int) -> None:
        self._transport, self._peer, self._lane = transport, peer, lane
        self._messages: OrderedDict[int, OutgoingMessage] = OrderedDict()  # unacknowledged, by number
        self._waiting: list[int] = []  # numbers of messages to send on this connection
        self._stream: Stream | None = None
        self._over: str | PeerLost | None = None
        self._changed = threading.Condition()  # callers add and drop messages while the thread sends them
        self._sending = -1
        self._thread = threading.Thread(target=self._serve, name=f"isles-to-{peer}", daemon=True)
        self._thread.start()

    def add(self, message: OutgoingMessage) -> None:
        """Queue `message` behind the others."""
        with self._changed:
            over = self._over
            if over is None:
                # Numbered under the lock: the receiver takes a number below its newest one for a repetition.
                number = self._transport.next_number()
                self._messages[number] = message
                self._waiting.append(number)
                self._notify()
        if over is not None:
            message.work.finished(lost_peer(self._peer, over))

    def drop(self, has_passed: Callable[[Tag], bool], *why: str) -> None:
        """Drop messages whose tags have passed. why: for `RoundClosed`."""
        with self._changed:
            numbers = [number for number, message in self._messages.items() if has_passed(message.tag)]
            ended = [self._messages.pop(number) for number in numbers]
            if self._sending in numbers and threading.current_thread() is not self._thread and self._stream is not None:
                self._stream.cut()  # the buffer goes back to its owner, so it must not be read further
        for message in ended:
            message.work.finished(RoundClosed(self._peer, *why))

    def end(self, why: str | PeerLost) -> None:
        """Send nothing any more, and fail all messages."""
        with self._changed:
            self._over = why
            messages = [*self._messages.values()]
            self._messages.clear()
            if self._stream is not None:
                self._stream.cut()
            self._notify()
        # Outside of the lock: this wakes transfers, which may send.
        for message in messages:
            message.work.finished(lost_peer(self._peer, why))

    def cut(self) -> None:
        """Break the connection; a new one is made."""
        with self._changed:
            if self._stream is not None:
                self._stream.cut()

    def _notify(self) -> None:
        self._changed.notify_all()
        if self._stream is not None:
            self._stream.wake()

    def _serve(self) -> None:
        pause = _AGAIN
        while self._over is None:
            try:
                stream = self._transport.connected(self._peer, self._lane, soon=bool(self._messages))
                if stream is None:
                    with self._changed:
                        self._changed.wait_for(lambda: self._messages or self._over is not None, _LOOK)
                    continue
                pause = _AGAIN
                self._serve_stream(stream)
            except (LinkLost, OSError, ValueError):  # also: no descriptor is left, or a key that is none
                with self._changed:
                    self._changed.wait_for(lambda: self._over is not None, pause)
                pause = min(2 * pause, _SELDOM)

    def _serve_stream(self, stream: Stream) -> None:
        """Send on `stream` until it breaks. Raises LinkLost."""
        with self._changed:
            self._stream = stream
            # All that is not acknowledged, in the order of its numbers: the peer discards what it has.
            self._waiting = [*self._messages]
            is_over = self._over is not None
        try:
            probed_at = -stream.lease  # so that the first probe is sent at once
            while not is_over:
                number = self._next()
                if number is not None:
                    self._send(stream, number)
                elif time.monotonic() - probed_at > stream.lease / 4:
                    stream.probe(self._handle)
                    probed_at = time.monotonic()
                else:
                    stream.wait(stream.lease / 4, self._handle)
                is_over = self._over is not None
        finally:
            with self._changed:
                self._stream = None
            self._transport.disconnected(self._peer, stream)
            stream.close()

    def _next(self) -> int | None:
        with self._changed:
            while self._waiting:
                number = self._waiting.pop(0)
                if number in self._messages:
                    return number
            return None

    def _send(self, stream: Stream, number: int) -> None:
        """Send a message, unless or until it is dropped."""
        with self._changed:
            message, self._sending = self._messages.get(number), number
        if message is None:
            return
        self._transport.resent += message.was_sent
        message.was_sent = True
        data, total = message.data.data, len(message.data)
        for offset in range(0, max(total, 1), CHUNK):
            piece = data[offset : offset + CHUNK]
            if number not in self._messages:
                break
            stream.send(Head(message.kind, number, offset, total, message.tag), piece, self._handle)
            self._transport.sent(self._peer, stream.way, len(piece))
        self._sending = -1

    def _handle(self, kind: int, number: int) -> None:
        """Handle an acknowledgement, perhaps while the message is still being sent."""
        with self._changed:
            message = self._messages.pop(number, None)
        if message is None:
            return
        if kind == ROUND_CLOSED:
            message.work.finished(RoundClosed(self._peer))
            self._transport.passed(self._peer, message.tag)
        elif kind == REFUSED:
            message.work.finished(PeerLost(self._peer, "it refused a message"))
        elif kind == TAKEN:
            message.work.finished()


class SuspicionReporter(Liveness):
    """ask: called in the waiting thread with a member for which a transfer waits too long."""

    def __init__(self, ask: Callable[[int], None]) -> None:
        super().__init__()
        self._ask = ask
        self._asked: dict[int, float] = {}

    @override
    def notify_blocked(self, peers: Collection[int | None], seconds: float) -> None:
        if seconds < SUSPECT_AFTER:
            return
        now = time.monotonic()
        self._asked = {member: at for member, at in self._asked.items() if now - at < SUSPECT_EVERY}
        for member in peers:
            if member is not None and member not in self._asked:
                self._asked[member] = now
                self._ask(member)


class ElasticTransport(OnHostClock):
    """One worker's end of the transport.

    session: to the lighthouse. member: this worker's id, its rank. size: number of workers of the initial world.
    on_lost, on_back: called with a member, in any thread, when this worker has no connection with it any more, and when
    it has one again. suspect: called with a member that is waited for too long. peers: makes connections. island_rank:
    this worker's rank in its island; it connects with the workers of the same rank in other islands. beside: the
    transport inside the island; both share counters and clock. connections: per peer and direction, over which a large
    message is spread; equal at all workers.

    resent: number of messages sent again. carried: bytes sent, by "direct" and "relayed", and bytes relayed for others,
    "relayed_by_workers".
    """

    native = False

    def __init__(
        self,
        session: Session,
        member: int,
        size: int,
        *,
        on_lost: Callable[[int], None] = lambda member: None,
        on_back: Callable[[int], None] = lambda member: None,
        suspect: Callable[[int], None] = lambda member: None,
        peers: Connects | None = None,
        island_rank: int = 0,
        beside: Transport | None = None,
        connections: int = 1,
    ) -> None:
        super().__init__(SuspicionReporter(suspect))
        if beside is not None:
            self.traffic, self._start = beside.traffic, time.perf_counter() - beside.now()
        self._room = f"isles/rank/{island_rank}" if island_rank else "isles"
        self.rank, self.size, self.resent = member, size, 0
        self.carried: Counter[str] = Counter(dict.fromkeys(CARRIED, 0))
        self._sent, self._taken = Counter[int](), Counter[int]()  # bytes by peer
        self._session, self._on_lost, self._on_back = session, on_lost, on_back
        self._peers = peers
        # Guards who is connected, and the order of on_lost and on_back. `give_up` takes `_lock` inside it.
        self._peers_lock = threading.Lock()
        self._known: set[int] = set()
        self._seen: set[int] = set()  # members that the lighthouse sees
        self._alive: dict[int, list[Stream]] = {}  # by member: connections with it
        self._takes: dict[MemberLane, tuple[Stream, threading.Thread]] = {}
        self._inboxes = [Inbox(session.refused) for _ in range(connections)]
        self._lock = threading.Lock()  # `_outgoing`, `_closed` and the counters
        self._lost: frozenset[int] = frozenset()
        self._outgoing: dict[MemberLane, Outgoing] = {}
        self._numbers = count()
        self._closed = False
        if peers is None:
            self.open()

    def open(self) -> None:
        """Appear to others, and watch them, now that they can reach this worker."""
        self._session.watch(f"{self._room}/{_MEMBER}/*", self._changed)
        self._session.present(f"{self._room}/{_MEMBER}/{self.rank}")

    @property
    def refused(self) -> Rejections:
        """Rejected messages, by (sender, reason)."""
        return self._session.refused

    @property
    def lost(self) -> Collection[int]:
        """Members without a connection now."""
        return self._lost

    def way(self, peer: int) -> str:
        """How messages to `peer` travel now; "" if there is no connection."""
        return next((stream.way for stream in self._alive.get(peer, ()) if stream.sends), "")

    def paths(self) -> list[PathRow]:
        """The paths to all peers, those with the most bytes first."""
        rows = list[PathRow]()
        with self._peers_lock, self._lock:  # in this order: `give_up` takes `_lock` inside `_peers_lock`
            for peer, _ in (self._sent + self._taken).most_common(MOST):
                trip = max((stream.round_trip for stream in self._alive.get(peer, ()) if stream.sends), default=0.0)
                rows.append((peer, self.way(peer), round(trip, 6), self._sent[peer], self._taken[peer]))
        return rows

    def send(self, peer: int, data: Tensor, tag: Tag) -> PostedWork:
        parts = self._parts(data)
        work = PostedWork(peer, data, self.now)
        counted = PartedWork(work, len(parts))
        for lane, part in enumerate(parts):
            with self._lock:
                outbox = None if peer in self._lost or self._closed else self._outbox(peer, lane)
            if outbox is None:
                counted.finished(PeerLost(peer, "its connection is gone"))
            else:
                outbox.add(OutgoingMessage(counted, part, tag))
        return work

    def _parts(self, data: Tensor) -> list[np.ndarray]:
        """The parts of a message, one per connection; equal at both ends, because sender and receiver both call
        this.
        """
        lanes = len(self._inboxes) if len(data) >= _LARGE else 1
        return np.array_split(data.numpy(), lanes)

    def _outbox(self, peer: int, lane: int = 0) -> Outgoing:
        """The queue to `peer`. Call with the lock held."""
        outbox = self._outgoing.get((peer, lane))
        if outbox is None:
            outbox = self._outgoing[peer, lane] = Outgoing(self, peer, lane)
        return outbox

    def _outboxes(self, peer: int) -> list[Outgoing]:
        with self._lock:
            return [outbox for (member, _), outbox in self._outgoing.items() if member == peer]

    def recv(self, peer: int | None, out: Tensor, tag: Tag) -> PostedWork:
        """Receive from one member. ValueError for `peer` None: from anyone is not offered."""
        if peer is None:
            raise ValueError("a receive from anyone is not offered where workers come and go: name the member")
        parts = self._parts(out)
        work = PostedWork(peer, out, self.now)
        counted = PartedWork(work, len(parts))

        def ended(why: str | PeerLost | None) -> None:
            counted.finished(None if why is None else lost_peer(peer, why))

        for inbox, part in zip(self._inboxes, parts, strict=False):
            if peer in self._lost:
                ended("its connection is gone")
            else:
                inbox.post(peer, tag, part, ended)
                if peer in self._lost:  # it broke between the check and `post`
                    inbox.drop(peer, "its connection is gone")
        return work

    def give_up(self, member: int, why: str | PeerLost) -> None:
        """End all transfers with `member`; later messages are tried again."""
        # First out of the table: a later message gets a new queue, and is tried again.
        with self._lock:
            outboxes = [self._outgoing.pop(key) for key in [*self._outgoing] if key[0] == member]
        for outbox in outboxes:
            outbox.end(why)
        for inbox in self._inboxes:
            inbox.drop(member, why)

    def over(self, channel: Channel, round: int) -> None:
        """Close the rounds of `channel` up to `round` here. Peers that have sent to one of them, or will, are notified,
        so that they do not wait for this worker.
        """
        last: dict[int, Tag] = {}
        for inbox in self._inboxes:
            for sender, tag in inbox.over(channel, round):
                last[sender] = max(last.get(sender, tag), tag)
        for sender, tag in last.items():
            with self._lock:
                outbox = None if sender in self._lost else self._outbox(sender)
            if outbox is not None:
                nothing = np.zeros(0, np.uint8)
                outbox.add(
                    OutgoingMessage(PartedWork(PostedWork(sender, nothing, self.now), 1), nothing, tag, CLOSE_ROUND)
                )

    def again(self, tag: Tag) -> None:
        """The attempt of `tag` has begun: cancel transfers of earlier attempts of its round, which members that were
        lost since may never complete.
        """
        for inbox in self._inboxes:
            inbox.again(tag)
        with self._lock:
            outboxes = list(self._outgoing.values())
        for outbox in outboxes:
            outbox.drop(lambda sent: sent.channel == tag.channel and before(sent, tag.round, tag.attempt), ANOTHER)

    def close(self) -> None:
        """End the threads. The session stays open: its opener closes it. Safe to call twice."""
        with self._lock:
            # Together under the lock: `send` makes no queue after this.
            self._closed = True
            outboxes, self._outgoing = list(self._outgoing.values()), {}
        for outbox in outboxes:
            outbox.end("this worker has ended")
        until = time.monotonic() + _FAREWELL
        with self._peers_lock:  # with the lock every registered thread has started
            takes = [*self._takes.values()]
        for stream, _ in takes:
            stream.finish()
        for stream, thread in takes:
            thread.join(max(until - time.monotonic(), 0.0))
            stream.cut()
        # Last: until here works end, and their transfers with them.
        self._driver.close()

    # Called by sending threads

    def next_number(self) -> int:
        """The next message number."""
        return next(self._numbers)

    def connected(self, peer: int, lane: int, *, soon: bool) -> Stream | None:
        """A connection to send to `peer` on; None if it would be relayed and nothing is to be sent `soon`. LinkLost if
        `peer` is not reached.
        """
        if self._peers is None:
            raise LinkLost("this worker reaches no peers")
        stream = self._peers.connect(peer, lane, soon=soon)
        if stream is not None:
            stream.sends = True
            self._register(peer, stream)
        return stream

    def sent(self, peer: int, way: str, size: int) -> None:
        """Count bytes sent to `peer`."""
        with self._lock:
            self.carried[way.partition(" ")[0]] += size
            self._sent[peer] += size

    def carries(self, size: int) -> None:
        """Count bytes that this worker has relayed between others."""
        with self._lock:
            self.carried["relayed_by_workers"] += size

    def passed(self, peer: int, tag: Tag) -> None:
        """`peer` has closed the round of `tag` and all before: cancel transfers of these."""
        for outbox in self._outboxes(peer):
            outbox.drop(lambda sent: sent.channel == tag.channel and sent.round <= tag.round)
        for inbox in self._inboxes:
            inbox.passed(peer, tag.channel, tag.round, RoundClosed(peer))

    # Receiving

    def take(self, member: int, stream: Stream) -> None:
        """Receive what `member` sends on `stream`, from now on."""
        # The thread starts under the lock: `close` joins only threads that have started.
        with self._peers_lock:
            before_it = self._takes.get((member, stream.lane))
            thread = threading.Thread(
                target=self._serve, args=(member, stream, before_it), name=f"isles-from-{member}", daemon=True
            )
            self._takes[member, stream.lane] = stream, thread
            thread.start()
        if self._closed or stream.lane >= len(self._inboxes):
            stream.cut()

    def cut(self, member: int) -> None:
        """Break all connections with `member`; new ones are made."""
        with self._peers_lock:
            for stream in self._alive.get(member, ()):
                stream.cut()

    def _serve(self, member: int, stream: Stream, before_it: tuple[Stream, threading.Thread] | None) -> None:
        # One reader at a time: two would mix the pieces of a sender's message.
        if before_it is not None:
            before_it[0].cut()
            before_it[1].join(_ENDS)
        self._register(member, stream)
        try:
            with suppress(LinkLost):  # this connection is over; the sender makes another one
                while True:
                    self._receive_one(member, stream)
        finally:
            self.disconnected(member, stream)
            stream.close()

    def _receive_one(self, member: int, stream: Stream) -> None:
        head, inbox = stream.head(), self._inboxes[min(stream.lane, len(self._inboxes) - 1)]
        if head.kind == CLOSE_ROUND:
            self.passed(member, head.tag)
        if head.kind != PIECE:
            stream.say(TAKEN if head.kind == CLOSE_ROUND else ALIVE, head.number)
            return
        while (buffer := inbox.begin(member, head, stream.cut)) is None:
            stream.holds()
            inbox.wait()
        try:
            stream.fill(buffer)
        except LinkLost:
            inbox.end(member, head, whole=False)
            raise
        with self._lock:
            self._taken[member] += head.size
        with stream.busy:
            result = inbox.end(member, head, whole=True)
            if result is not None:
                stream.say(result, head.number)

    # Liveness

    def _register(self, member: int, stream: Stream) -> None:
        with self._peers_lock:
            self._alive.setdefault(member, []).append(stream)
            self._update_presence(member)

    def disconnected(self, member: int, stream: Stream) -> None:
        """A connection broke."""
        with self._peers_lock:
            self._alive[member].remove(stream)
            self._update_presence(member)

    def _changed(self, key: str, there: bool) -> None:
        """The lighthouse reports that a member has connected or disconnected."""
        name = key.rpartition("/")[2]
        if not name.isdecimal() or len(name) > 9 or int(name) == self.rank:
            return
        member = int(name)
        with self._peers_lock:
            (self._seen.add if there else self._seen.discard)(member)
            self._update_presence(member)
        if there:
            with self._lock:
                if not self._closed:
                    self._outbox(member)  # its thread dials at once, if there is a direct way

    def _update_presence(self, member: int) -> None:
        is_there = member in self._seen or bool(self._alive.get(member))
        if is_there and (member in self._lost or member not in self._known):
            self._known.add(member)
            self._lost -= {member}
            self._on_back(member)
        elif not is_there and member not in self._lost and not self._closed:
            self._lost |= {member}
            self.give_up(member, "its connection is gone")
            self._on_lost(member)
