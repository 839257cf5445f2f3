"""The receiving side of messages in pieces, without a network: what has come, what is waited for, what nobody wants.

A message goes as chunks of `CHUNK` bytes, each with the message's number at its sender, its offset and the length of
the whole. A chunk is acknowledged once it is in its place, or kept for a receive that is not posted yet; one that comes
twice is acknowledged again. Messages of one address are taken in their order. What nobody asked for is kept up to
`EARLY` bytes a sender and `EARLY_OF_ALL` together. A receive takes exactly what was posted: another length is refused.
What belongs to a round that is over is not taken, so that its sender does not wait for an answer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from isles.comm.elastic.guards.refusals import Refusals
from isles.comm.errors import PeerLost, RoundPassed
from isles.comm.tags import Channel, Tag

CHUNK = 1 << 20
EARLY = 16 << 20
EARLY_OF_ALL = 32 << 20
_LONGEST = 1 << 36  # bytes of a message
_STALE = 8  # rounds: whoever posts a receive of round r waits no more for those of rounds before r - 8
_FINISHED = 4096  # messages whose late chunks are still known, by sender
ANOTHER = "another attempt of that round has begun"

Ended = Callable[[str | PeerLost | None], None]
Verdict = Literal["kept", "later", "never", "over"]


class Chunk(NamedTuple):
    """A piece of message `number` of its sender, at address `tag`: where in it, and how long it is as a whole."""

    tag: Tag
    number: int
    offset: int
    total: int


@dataclass(eq=False)
class Receive:
    """A receive that was posted. number: of the message that it takes, once its first chunk has come. ended: called
    once, with None or with what went wrong.
    """

    tag: Tag
    out: np.ndarray
    ended: Ended
    offsets: set[int] = field(default_factory=set)
    left: int = 0
    number: int | None = None


@dataclass
class _Early:
    """Chunks of a message that nobody has asked for yet."""

    tag: Tag
    total: int
    chunks: dict[int, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(len(chunk) for chunk in self.chunks.values())


@dataclass
class _Sender:
    """What is known of one sender."""

    posted: dict[Tag, Receive] = field(default_factory=dict)
    early: dict[int, _Early] = field(default_factory=dict)  # by the message's number
    early_bytes: int = 0
    finished: OrderedDict[int, None] = field(default_factory=OrderedDict)


def offsets(total: int) -> range:
    """Where the chunks of a message of `total` bytes begin; an empty message is one empty chunk."""
    return range(0, max(total, 1), CHUNK)


def before(tag: Tag, round: int, attempt: int) -> bool:
    """Whether it is of an earlier attempt of that round."""
    return tag.round == round and tag.attempt < attempt


class Inbox:
    """The receiving side of one worker. Safe to call from several threads. refused: where chunks that were not taken
    are counted, by sender; by default here.
    """

    def __init__(self, refused: Refusals | None = None) -> None:
        self.refused = Refusals() if refused is None else refused
        self._senders: dict[int, _Sender] = {}
        self._over: dict[Channel, int] = {}  # the newest round that is over
        self._again: dict[Channel, tuple[int, int]] = {}  # the newest round of several attempts, and its newest attempt
        self._lock = threading.Lock()

    def post(self, sender: int, tag: Tag, out: np.ndarray, ended: Ended) -> None:
        """Receive exactly `len(out)` bytes from `sender` into (n,) uint8 `out`. ended: called once, perhaps at once."""
        receive = Receive(tag, out, ended, left=len(offsets(len(out))))
        with self._lock:
            has_passed = self._has_passed(tag)
            known = self._senders.setdefault(sender, _Sender())
            given_up = self._forget_old(known, tag)
            if not has_passed:
                known.posted[tag] = receive
            number = min((number for number, early in known.early.items() if early.tag == tag), default=None)
            early = None if number is None else known.early.pop(number)
            if early is not None:
                known.early_bytes -= early.size
        for old in given_up:
            old.ended("nobody waits for it any more")
        if has_passed:
            ended(RoundPassed(sender, ANOTHER))
        elif early is not None and number is not None:
            for offset, data in early.chunks.items():
                self.take(sender, Chunk(tag, number, offset, early.total), data)

    def take(self, sender: int, chunk: Chunk, data: bytes) -> Verdict:
        """A chunk has come. kept: acknowledge it; later: it should be sent again in a while; never: it is refused;
        over: its round is.
        """
        tag, number, offset, total = chunk
        with self._lock:
            known = self._senders.setdefault(sender, _Sender())
            if number in known.finished:
                return "kept"
            if offset < 0 or offset % CHUNK or offset >= max(total, 1) or len(data) != min(CHUNK, total - offset):
                return self._refuse(sender, "pieces that do not fit together")
            receive = known.posted.get(tag)
            if self._is_over(tag):
                return "over"
            if receive is None or receive.number not in (None, number):
                return self._keep(known, sender, chunk, data)
            if total != len(receive.out):
                return self._refuse(sender, "another length than was asked for")
            if offset in receive.offsets:
                return "kept"
            receive.number = number
            receive.offsets.add(offset)
        receive.out[offset : offset + len(data)] = np.frombuffer(data, np.uint8)  # outside the lock: it takes a while
        with self._lock:
            receive.left -= 1
            whole = receive.left == 0 and known.posted.get(tag) is receive
            if whole:
                del known.posted[tag]
                self._finish(known, number)
        if whole:
            receive.ended(None)
        return "kept"

    def over(self, channel: Channel, round: int) -> list[tuple[int, Tag]]:
        """Rounds of `channel` up to `round` are over, and no later ones: nothing of them is taken any more.
        (sender, tag) of what came for them in vain.
        """
        vain, ended = list[tuple[int, Tag]](), list[Receive]()
        with self._lock:
            self._over[channel] = round
            for sender, known in self._senders.items():
                for number in [number for number, early in known.early.items() if self._is_over(early.tag)]:
                    early = known.early.pop(number)
                    known.early_bytes -= early.size
                    vain.append((sender, early.tag))
                ended += [known.posted.pop(tag) for tag in [*known.posted] if self._is_over(tag)]
        for receive in ended:
            receive.ended("that round is over here")
        return vain

    def again(self, tag: Tag) -> None:
        """The attempt of `tag` has begun: nobody waits any more in those of its round before it."""
        with self._lock:
            known_of = self._again.get(tag.channel, (-1, 0))
            self._again[tag.channel] = max(known_of, (tag.round, tag.attempt))
            ended = [
                (sender, known.posted.pop(old))
                for sender, known in self._senders.items()
                for old in [*known.posted]
                if self._has_passed(old)
            ]
        for sender, receive in ended:
            receive.ended(RoundPassed(sender, ANOTHER))

    def end(self, sender: int, channel: Channel, round: int, why: PeerLost) -> None:
        """Nothing comes from `sender` any more for rounds of `channel` up to `round`."""
        with self._lock:
            known = self._senders.get(sender, _Sender())
            ended = [known.posted.pop(tag) for tag in [*known.posted] if tag.channel == channel and tag.round <= round]
        for receive in ended:
            receive.ended(why)

    def drop(self, sender: int, why: str | PeerLost) -> None:
        """`sender` is gone: end its receives and forget what it sent."""
        with self._lock:
            known = self._senders.pop(sender, _Sender())
        for receive in known.posted.values():
            receive.ended(why)

    def held(self) -> int:
        """Bytes kept of messages that nobody has asked for."""
        with self._lock:
            return sum(known.early_bytes for known in self._senders.values())

    def _is_over(self, tag: Tag) -> bool:
        return tag.round <= self._over.get(tag.channel, -1)

    def _has_passed(self, tag: Tag) -> bool:
        return before(tag, *self._again.get(tag.channel, (-1, 0)))

    def _keep(self, known: _Sender, sender: int, chunk: Chunk, data: bytes) -> Verdict:
        if chunk.total > _LONGEST:
            return self._refuse(sender, "a message longer than any")
        early = known.early.get(chunk.number)
        if early is not None and (early.tag, early.total) != (chunk.tag, chunk.total):
            return self._refuse(sender, "pieces that do not fit together")
        if early is not None and chunk.offset in early.chunks:
            return "kept"
        all_bytes = sum(other.early_bytes for other in self._senders.values())
        full = known.early_bytes + len(data) > EARLY or all_bytes + len(data) > EARLY_OF_ALL
        if full or len(known.early) >= _FINISHED:
            self.refused.note(sender, "more than is kept of what nobody asked for")
            return "later"
        known.early.setdefault(chunk.number, _Early(chunk.tag, chunk.total)).chunks[chunk.offset] = data
        known.early_bytes += len(data)
        return "kept"

    def _refuse(self, sender: int, why: str) -> Verdict:
        self.refused.note(sender, why)
        return "never"

    def _finish(self, known: _Sender, number: int) -> None:
        known.finished[number] = None
        if len(known.finished) > _FINISHED:
            known.finished.popitem(last=False)

    def _forget_old(self, known: _Sender, tag: Tag) -> list[Receive]:
        """Rounds long over: their receives, which missed their deadlines, and what came for nobody. Other channels have
        no rounds: the numbers there count letters, batches or calls, many of which are under way at a time.
        """
        if tag.channel != "outer":
            return []

        def old(other: Tag) -> bool:
            return other.channel == tag.channel and other.round < tag.round - _STALE

        for number in [number for number, early in known.early.items() if old(early.tag)]:
            known.early_bytes -= known.early.pop(number).size
            self._finish(known, number)
        return [known.posted.pop(other) for other in [other for other in known.posted if old(other)]]
