"""The receiving side of messages in segments, without a network: unexpected messages, posted receives, closed rounds.

The segments of a message arrive one after the other; a segment of another message in between means that the sender has
dropped the first one. Segments are read straight into the buffer of the receive that was posted for their tag, or
buffered if there is none: up to `UNEXPECTED` bytes per sender and `UNEXPECTED_OF_ALL` in total. Beyond that the
sender's connection is not read until there is room, so that TCP slows it down. A message that arrives twice, because
its connection broke, is delivered once. A receive takes exactly the posted length; another length is refused. Messages
of a closed round are acknowledged as such, so that their sender does not wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from isles.comm.errors import PeerLost, RoundClosed
from isles.comm.tags import Channel, Tag
from isles.membership.p2p.stream import REFUSED, ROUND_CLOSED, TAKEN, Head
from isles.membership.session import Rejections

UNEXPECTED = 16 << 20
UNEXPECTED_OF_ALL = 32 << 20
_LONGEST = 1 << 36  # the most bytes of a message
_STALE = 8  # posting a receive of round r cancels receives of rounds before r - 8
_LEAST = 4096  # bytes that an unclaimed message counts for at least: many empty ones take memory too
_GLANCE = 0.1  # most seconds to wait for room: the sender must go on getting signs of life
ANOTHER = "another attempt of that round has begun"

Ended = Callable[[str | PeerLost | None], None]


def before(tag: Tag, round: int, attempt: int) -> bool:
    """Whether `tag` is of an earlier attempt of that round."""
    return tag.round == round and tag.attempt < attempt


@dataclass(eq=False)
class Receive:
    """A posted receive. ended: called once, with None or an error. cut: breaks the connection from which `out` is being
    filled now; why: an error that occurred meanwhile.
    """

    tag: Tag
    out: np.ndarray
    ended: Ended
    cut: Callable[[], None] | None = None
    why: tuple[str | PeerLost] | None = None

    def end(self, why: str | PeerLost) -> bool:
        """Mark as finished; True if nothing fills the buffer now, so that `ended` may be called."""
        self.why = (why,)
        if self.cut is not None:
            self.cut()
        return self.cut is None


@dataclass(eq=False)
class _ArrivingMessage:
    """A message that is arriving: into a posted receive, into a buffer of its own (`unclaimed`), or to be discarded."""

    head: Head
    receive: Receive | None = None
    unclaimed: bytearray | None = None
    result: int = TAKEN
    next: int = 0  # the offset of its next piece


@dataclass
class _Sender:
    """The state of one sender. newest, held_back: numbers of the newest delivered message, and of one that waits for
    room. unclaimed: by tag, complete messages without a receive.
    """

    newest: int = -1
    held_back: int = -1
    posted: dict[Tag, Receive] = field(default_factory=dict)
    unclaimed: dict[Tag, list[bytearray]] = field(default_factory=dict)
    bytes: int = 0
    coming: _ArrivingMessage | None = None


class Inbox:
    """The receiving side of one worker. Safe to call from several threads. refused: counts rejected messages by sender;
    by default a counter of its own.
    """

    def __init__(self, refused: Rejections | None = None) -> None:
        self.refused = Rejections() if refused is None else refused
        self._senders: dict[int, _Sender] = {}
        self._over: dict[Channel, int] = {}  # by channel: the newest closed round
        self._again: dict[Channel, tuple[int, int]] = {}  # by channel: the newest retried round, and its newest attempt
        # Guards all of the above. `ended` is called outside of it, because it takes locks of works and transfers.
        self._changed = threading.Condition()

    def post(self, sender: int, tag: Tag, out: np.ndarray, ended: Ended) -> None:
        """Receive exactly `len(out)` bytes from `sender` into (n,) uint8 `out`. `ended` may be called at once."""
        receive = Receive(tag, out, ended)
        with self._changed:
            known = self._senders.setdefault(sender, _Sender())
            abandoned = self._forget_old(known, tag)
            has_passed = self._has_passed(tag)
            whole = None
            if not has_passed:
                whole = self._take_unclaimed(known, tag, len(out))
                if whole is None:
                    known.posted[tag] = receive
            self._changed.notify_all()
        for old in abandoned:
            old.ended("it is no longer waited for")
        if has_passed:
            ended(RoundClosed(sender, ANOTHER))
        elif whole is not None:
            out[:] = np.frombuffer(whole, np.uint8)
            ended(None)

    def begin(self, sender: int, head: Head, cut: Callable[[], None]) -> memoryview | None:
        """A piece arrives from `sender`: returns the memory for its bytes; None: no room, call `wait`. cut: breaks the
        connection on which it arrives.
        """
        with self._changed:
            known = self._senders.setdefault(sender, _Sender())
            coming = known.coming
            if coming is None or (coming.head.number, coming.head.total, coming.next) != (
                head.number,
                head.total,
                head.offset,
            ):
                self._abandon(known)
                coming = known.coming = self._begin_message(sender, known, head)
                if coming is None:
                    return None
            coming.next = head.offset + head.size
            receive = coming.receive
            if receive is not None and receive.why is None and known.posted.get(head.tag) is receive:
                receive.cut = cut
                return receive.out.data[head.offset : coming.next]
            if receive is not None:
                coming.receive, coming.result = None, ROUND_CLOSED
            if coming.unclaimed is not None:
                return memoryview(coming.unclaimed)[head.offset : coming.next]
            return memoryview(bytearray(head.size))

    def end(self, sender: int, head: Head, *, whole: bool) -> int | None:
        """That piece has arrived, or (not `whole`) its connection broke. Returns the acknowledgement of its message;
        None if more of it is to come.
        """
        ended: tuple[Receive, str | PeerLost | None] | None = None
        result = None
        with self._changed:
            known = self._senders.setdefault(sender, _Sender())
            coming = known.coming
            receive = None if coming is None else coming.receive
            if receive is not None:
                receive.cut = None
                if receive.why is not None:
                    ended = receive, receive.why[0]
            if not whole:
                self._abandon(known)
            elif coming is not None and (coming.next >= head.total or coming.result != TAKEN):
                result = coming.result
                if coming.next >= head.total:
                    known.newest = max(known.newest, head.number) if result == TAKEN else known.newest
                    known.coming = None
                    if receive is not None and ended is None:
                        known.posted.pop(head.tag, None)
                        ended = receive, None
                    elif coming.unclaimed is not None:
                        ended = self._keep(known, head, coming.unclaimed)
            self._changed.notify_all()
        if ended is not None:
            ended[0].ended(ended[1])
        return result

    def over(self, channel: Channel, round: int) -> list[tuple[int, Tag]]:
        """Close rounds of `channel` up to `round`: their messages are not accepted any more. Returns (sender, tag) of
        unclaimed ones.
        """
        vain = list[tuple[int, Tag]]()
        with self._changed:
            self._over[channel] = round
            for sender, known in self._senders.items():
                for tag in [tag for tag in known.unclaimed if self._is_over(tag)]:
                    self._drop_unclaimed(known, tag)
                    vain.append((sender, tag))
            ended = self._ended(self._is_over, "that round is over here")
        self._call(ended)
        return vain

    def again(self, tag: Tag) -> None:
        """The attempt of `tag` has begun: cancel receives of earlier attempts of its round."""
        with self._changed:
            known_of = self._again.get(tag.channel, (-1, 0))
            self._again[tag.channel] = max(known_of, (tag.round, tag.attempt))
            ended = self._ended(self._has_passed, None)
        self._call(ended)

    def passed(self, sender: int, channel: Channel, round: int, why: PeerLost) -> None:
        """`sender` sends nothing more for rounds of `channel` up to `round`."""
        with self._changed:
            ended = self._ended(lambda tag: tag.channel == channel and tag.round <= round, why, sender)
        self._call(ended)

    def drop(self, sender: int, why: str | PeerLost) -> None:
        """`sender` is lost: end its receives and drop its unclaimed messages; remember which ones were delivered."""
        with self._changed:
            ended = self._ended(lambda tag: True, why, sender)
            known = self._senders.get(sender)
            if known is not None:
                for tag in [*known.unclaimed]:
                    self._drop_unclaimed(known, tag)  # a message that is still arriving keeps its room
        self._call(ended)

    def wait(self) -> None:
        """Wait a moment, or until there may be room."""
        with self._changed:
            self._changed.wait(_GLANCE)

    def held(self) -> int:
        """Bytes of complete unclaimed messages."""
        with self._changed:
            return sum(
                len(one) for known in self._senders.values() for waiting in known.unclaimed.values() for one in waiting
            )

    # Under the lock

    def _begin_message(self, sender: int, known: _Sender, head: Head) -> _ArrivingMessage | None:
        """A new message begins; None while there is no room for it."""
        if head.offset or head.number < 0 or head.total < 0:
            return self._refuse(sender, head, "pieces that do not fit together")
        if head.total > _LONGEST:
            return self._refuse(sender, head, "a message beyond the size limit")
        # Before the look at closed rounds: it was taken, and must be acknowledged as taken again.
        if head.number <= known.newest:
            return _ArrivingMessage(head)  # a repetition: read and discard it
        if self._is_over(head.tag):
            return _ArrivingMessage(head, result=ROUND_CLOSED)
        receive = known.posted.get(head.tag)
        if receive is not None:
            if head.total != len(receive.out):
                return self._refuse(sender, head, "another length than the receive's")
            return None if receive.cut is not None else _ArrivingMessage(head, receive)
        size = max(head.total, _LEAST)
        others = sum(other.bytes for other in self._senders.values())
        if known.bytes + size <= UNEXPECTED and others + size <= UNEXPECTED_OF_ALL:
            known.bytes += size
            return _ArrivingMessage(head, unclaimed=bytearray(head.total))
        if known.held_back != head.number:
            known.held_back = head.number
            self.refused.note(sender, "more unexpected messages than are buffered")
        return None

    def _refuse(self, sender: int, head: Head, why: str) -> _ArrivingMessage:
        self.refused.note(sender, why)
        return _ArrivingMessage(head, result=REFUSED)

    def _abandon(self, known: _Sender) -> None:
        """Discard what has arrived of the present message."""
        if known.coming is not None and known.coming.unclaimed is not None:
            known.bytes -= max(known.coming.head.total, _LEAST)
        known.coming = None

    def _keep(self, known: _Sender, head: Head, whole: bytearray) -> tuple[Receive, str | None] | None:
        """A buffered message is complete; it is delivered if a receive was posted meanwhile."""
        receive = known.posted.get(head.tag)
        if receive is None or receive.cut is not None or len(receive.out) != len(whole):
            known.unclaimed.setdefault(head.tag, []).append(whole)
            return None
        known.bytes -= max(len(whole), _LEAST)
        receive.out[:] = np.frombuffer(whole, np.uint8)
        del known.posted[head.tag]
        return receive, None

    def _take_unclaimed(self, known: _Sender, tag: Tag, size: int) -> bytearray | None:
        waiting = known.unclaimed.get(tag, [])
        message = next((one for one in waiting if len(one) == size), None)
        if message is not None:
            known.unclaimed[tag] = [one for one in waiting if one is not message]
            known.bytes -= max(size, _LEAST)
            if not known.unclaimed[tag]:
                del known.unclaimed[tag]
        return message

    def _drop_unclaimed(self, known: _Sender, tag: Tag) -> None:
        known.bytes -= sum(max(len(one), _LEAST) for one in known.unclaimed.pop(tag, []))

    def _ended(
        self, which: Callable[[Tag], bool], why: str | PeerLost | None, sender: int | None = None
    ) -> list[tuple[Receive, str | PeerLost]]:
        """Remove matching receives; returns those that nothing fills now. why: None: another attempt has begun."""
        idle = list[tuple[Receive, str | PeerLost]]()
        for one, known in self._senders.items():
            for tag in [tag for tag in known.posted if which(tag)] if sender in (None, one) else []:
                receive, because = known.posted.pop(tag), why or RoundClosed(one, ANOTHER)
                if receive.end(because):
                    idle.append((receive, because))
        self._changed.notify_all()
        return idle

    def _call(self, ended: list[tuple[Receive, str | PeerLost]]) -> None:
        for receive, why in ended:
            receive.ended(why)

    def _is_over(self, tag: Tag) -> bool:
        return tag.round <= self._over.get(tag.channel, -1)

    def _has_passed(self, tag: Tag) -> bool:
        return before(tag, *self._again.get(tag.channel, (-1, 0)))

    def _forget_old(self, known: _Sender, tag: Tag) -> list[Receive]:
        """Cancel receives and drop messages of rounds long past. On other channels numbers are no rounds (they count
        messages, batches or calls, many of which are in flight at a time), so nothing is stale there.
        """
        if tag.channel != "outer":
            return []

        def old(other: Tag) -> bool:
            return other.channel == tag.channel and other.round < tag.round - _STALE

        for other in [other for other in known.unclaimed if old(other)]:
            self._drop_unclaimed(known, other)
        stale = [known.posted.pop(other) for other in [other for other in known.posted if old(other)]]
        return [receive for receive in stale if receive.end("it is no longer waited for")]
