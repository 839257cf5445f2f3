"""The transport of elastic worlds: messages between seats over a `Session`, direct or relayed, in chunks with receipts.

A rank is a seat. A chunk is a question and its receipt the answer, so the sender knows what has arrived; a chunk
without an answer is sent again, and the receiver recognizes one that it has. At most `WINDOW` chunks are under way to
each peer, sent by that peer's own thread, so that a slow peer delays nobody else. A peer that ends, stands still or is
cut off fails the works with it, and no others.

A peer that is linked directly (`DirectLinks`) is reached over that link, and over the lighthouse where it breaks; it is
gone once both are.
"""

from __future__ import annotations

import hmac
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from itertools import count

import numpy as np
from torch import Tensor

from isles.comm.elastic.chunks.incoming import ANOTHER, Chunk, Inbox, before
from isles.comm.elastic.chunks.outgoing import HEAD, OVER, Outgoing, OutgoingMessage, lost_peer
from isles.comm.elastic.chunks.patience import UnderWay
from isles.comm.elastic.control import Answered, Query
from isles.comm.elastic.guards.doubts import Doubts
from isles.comm.elastic.guards.refusals import Refusals
from isles.comm.elastic.keys import PROOF, sealed
from isles.comm.elastic.links.guide import Guide, Trusting
from isles.comm.elastic.links.relayed import WAYS
from isles.comm.elastic.session import Session
from isles.comm.errors import PeerLost, RoundPassed
from isles.comm.gloo.host_clock import OnHostClock
from isles.comm.gloo.transfers import PostedWork
from isles.comm.tags import CHANNELS, Channel, Tag
from isles.comm.transport import Transport

_SEATS = 1 << 20
_MAIL, _SEAT = "mail", "seat"


class ElasticTransport(OnHostClock):
    """One worker's end of the transport.

    session: to the lighthouse. seat: this worker's, its rank. size: number of workers of the world that it begins in.
    gone, back: called with a seat, in a session's thread, when its last connection breaks and when it has one again.
    doubt: called with a seat that is waited for in vain. place: this worker's in its island; it reaches the workers at
    the same place of other islands. beside: the transport inside the island; both count together, by one clock.

    resent: chunks sent again. carried: bytes of the chunks that went out, by "direct" and "relayed".
    """

    native = False

    def __init__(
        self,
        session: Session,
        seat: int,
        size: int,
        *,
        gone: Callable[[int], None] = lambda seat: None,
        back: Callable[[int], None] = lambda seat: None,
        doubt: Callable[[int], None] = lambda seat: None,
        guide: Guide | None = None,
        place: int = 0,
        beside: Transport | None = None,
    ) -> None:
        super().__init__(Doubts(doubt))
        if beside is not None:
            self.traffic, self._start = beside.traffic, time.perf_counter() - beside.now()
        self._room = f"isles/place/{place}" if place else "isles"
        self.rank, self.size, self.resent, self.under_way = seat, size, 0, UnderWay()
        self.carried: Counter[str] = Counter(dict.fromkeys(WAYS, 0))
        self._relay, self._gone, self._back = session, gone, back
        self._guide: Guide = guide or Trusting()
        self._meeting = threading.Lock()  # sessions tell of their seats in threads of their own
        self._ways: dict[int, tuple[Session, ...]] = {}  # by seat: where it is there now
        self._inbox = Inbox(session.refused)
        self._lock = threading.Lock()
        self._lost: frozenset[int] = frozenset()
        self._outgoing: dict[int, Outgoing] = {}
        self._numbers = count()
        self.link(session, None)

    def link(self, session: Session, peer: int | None) -> None:
        """Reach `peer`, or whoever is there, over `session` too."""
        session.serve(f"{self._room}/{_MAIL}/{self.rank}", self._take)
        session.watch(f"{self._room}/{_SEAT}/{'*' if peer is None else peer}", partial(self._changed, session))
        session.present(f"{self._room}/{_SEAT}/{self.rank}")

    @property
    def refused(self) -> Refusals:
        """Chunks that were not taken, by (sender, reason)."""
        return self._inbox.refused

    @property
    def lost(self) -> Collection[int]:
        """Seats whose connection is broken now."""
        return self._lost

    def send(self, peer: int, data: Tensor, tag: Tag) -> PostedWork:
        work = PostedWork(peer, data, self.now)
        with self._lock:
            line = None if peer in self._lost else self._line(peer)
        if line is None:
            work.finished(PeerLost(peer, "its connection is gone"))
        else:
            line.add(OutgoingMessage(work, data.numpy(), tag, next(self._numbers)))
        return work

    def _line(self, peer: int) -> Outgoing:
        """To that peer; under the lock."""
        line = self._outgoing.get(peer)
        if line is None:
            line = self._outgoing[peer] = Outgoing(self, peer)
        return line

    def recv(self, peer: int | None, out: Tensor, tag: Tag) -> PostedWork:
        """Receive from one seat. ValueError for `peer` None: from anyone is not offered."""
        if peer is None:
            raise ValueError("a receive from anyone is not offered where workers come and go: name the seat")
        work = PostedWork(peer, out, self.now)

        def ended(why: str | PeerLost | None) -> None:
            work.finished(None if why is None else lost_peer(peer, why))

        if peer in self._lost:
            ended("its connection is gone")
        else:
            self._inbox.post(peer, tag, out.numpy(), ended)
            if peer in self._lost:  # it broke meanwhile
                self._inbox.drop(peer, "its connection is gone")
        return work

    def give_up(self, seat: int, why: str | PeerLost) -> None:
        """End all that is under way with `seat`; later messages are tried again."""
        with self._lock:
            line = self._outgoing.pop(seat, None)
        if line is not None:
            line.end(why)
        self._inbox.drop(seat, why)

    def over(self, channel: Channel, round: int) -> None:
        """Rounds of `channel` up to `round` are over here, and no later ones: whoever sends to one of them, or has
        sent, is told so, and waits no longer for this worker's part in it.
        """
        last: dict[int, Tag] = {}
        for sender, tag in self._inbox.over(channel, round):
            last[sender] = max(last.get(sender, tag), tag)
        for sender, tag in last.items():
            with self._lock:
                line = None if sender in self._lost else self._line(sender)
            if line is not None:
                nothing = np.zeros(0, np.uint8)
                line.add(
                    OutgoingMessage(PostedWork(sender, nothing, self.now), nothing, tag, next(self._numbers)), OVER
                )

    def again(self, tag: Tag) -> None:
        """The attempt of `tag` has begun, without some of those of before: who waits in earlier ones of its round, in a
        part of the exchange that those did not reach, waits no longer.
        """
        self._inbox.again(tag)
        with self._lock:
            lines = list(self._outgoing.values())
        for line in lines:
            line.drop(lambda sent: sent.channel == tag.channel and before(sent, tag.round, tag.attempt), ANOTHER)

    def passed(self, peer: int, tag: Tag) -> None:
        """`peer` has said that the round of `tag` is over there, and all before: nothing is sent or asked of them."""
        with self._lock:
            line = self._outgoing.get(peer)
        if line is not None:
            line.drop(lambda sent: sent.channel == tag.channel and sent.round <= tag.round)
        self._inbox.end(peer, tag.channel, tag.round, RoundPassed(peer))

    def close(self) -> None:
        """End the threads. The session is whoever's who opened it. Safe to call twice."""
        with self._lock:
            lines, self._outgoing = list(self._outgoing.values()), {}
        for line in lines:
            line.end("this worker has ended")
        self._driver.close()

    def _take(self, asked: Query) -> None:
        """A chunk has come."""
        attached, data = asked.attachment, asked.payload
        head, seal = attached[: HEAD.size], attached[HEAD.size :]
        told = _told(head) if len(seal) == PROOF else None
        if told is None:
            self.refused.note(-1, "no message of this library")
            asked.refuse(b"never")
            return
        sender, chunk = told
        if not 0 <= sender < _SEATS or sender in self._lost:
            self.refused.note(-1, "a message of nobody who is there")
            asked.refuse(b"later")  # its sign of life may be on its way
            return
        if not hmac.compare_digest(seal, sealed(self._guide.expected(sender), head, data)):
            self.refused.note(-1, "a message in another's name")
            asked.refuse(b"never")
            return
        if (chunk.offset, chunk.total) == (OVER, 0):
            asked.reply()
            self.passed(sender, chunk.tag)
            return
        verdict = self._inbox.take(sender, chunk, data)
        if verdict == "kept":
            asked.reply()
        else:
            asked.refuse(verdict.encode("ascii"))

    def way(self, peer: int) -> Session:
        """The session over which `peer` is reached now."""
        return next((way for way in self._ways.get(peer, ()) if way is not self._relay), self._relay)

    def introduction(self, peer: int) -> bytes | None:
        """By which a message to `peer` is sealed."""
        return self._guide.introduction(peer)

    def ship(self, peer: int, chunk: bytes, head: bytes, answered: Answered, seconds: float) -> None:
        """Send a chunk the way that `peer` is reached now. OSError once the session is closed."""
        way, began = self.way(peer), time.monotonic()

        def settled(reply: bytes | None, refusal: bytes | None) -> None:
            if reply is not None or refusal is not None or time.monotonic() - began >= seconds:
                with self._lock:  # or nobody was known to take it, and it never left
                    self.carried["relayed" if way is self._relay else "direct"] += len(chunk)
            answered(reply, refusal)

        way.ask(f"{self._room}/{_MAIL}/{peer}", chunk, settled, attachment=head, seconds=seconds)

    def _changed(self, session: Session, key: str, there: bool) -> None:
        """Somebody is there, or not any more, as far as `session` knows."""
        name = key.rpartition("/")[2]
        if not name.isdecimal() or len(name) > 9 or int(name) == self.rank:
            return
        seat = int(name)
        with self._meeting:
            ways = tuple(way for way in self._ways.get(seat, ()) if way is not session) + (session,) * there
            self._ways[seat] = ways
            if there:
                self._lost -= {seat}
                self._back(seat)
            elif not ways:
                self._lost |= {seat}
                self.give_up(seat, "its connection is gone")
                self._gone(seat)
        self._guide.met(seat, there=bool(ways), direct=self.way(seat) is not self._relay)


def _told(head: bytes) -> tuple[int, Chunk] | None:
    """(sender, which piece) of a `HEAD`; None where it is none."""
    try:
        *fields, number, offset, total, sender = HEAD.unpack(head)
        return sender, Chunk(Tag(CHANNELS[fields[0]], *fields[1:]), number, offset, total)
    except (struct.error, IndexError):
        return None
