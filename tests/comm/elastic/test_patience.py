"""What is sent twice over a slow line: hardly anything, whatever its rate; and how soon a lost chunk is sent again."""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest

from isles.comm.elastic.chunks.incoming import CHUNK
from isles.comm.elastic.chunks.outgoing import WINDOW, Answered, Outgoing, OutgoingMessage
from isles.comm.elastic.chunks.patience import SHORTEST, Patience, UnderWay
from isles.comm.gloo.transfers import PostedWork
from isles.comm.tags import Tag

MBIT = 1e6 / 8  # bytes per second


class SlowLine:
    """Chunks that a sender has on a line, one behind the other over each of `hops`, on a clock of its own: `WINDOW` at
    a time, and after one without a receipt one at a time, as in `Outgoing`. The other end sends as much, and its
    receipts are behind that. rate: bytes per second, by the clock. noise: a chunk takes up to so much longer, as a
    share.
    """

    def __init__(self, rate: Callable[[float], float], hops: int = 2, noise: float = 0.0) -> None:
        self.patience, self.now, self.again = Patience(), 0.0, 0
        self._rate, self._free, self._noise = rate, [0.0] * hops, noise
        self._random = random.Random(0)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._number), what))

    def _arrival(self, size: int) -> float:
        at = self.now
        for hop, free in enumerate(self._free):
            at = max(at, free) + size / self._rate(at) * (1 + self._noise * self._random.random())
            self._free[hop] = at
        return at + 0.05

    def send(self, size: int, lost: int = -1) -> float:
        """A message of `size` bytes; seconds until all of it has its receipts. lost: of the chunk that goes out as that
        one nothing comes.
        """
        began, shipped, under_way, flying, window = self.now, 0, 0, 0, WINDOW
        left = [min(CHUNK, size - begin) for begin in range(0, size, CHUNK)]

        def ship(part: int) -> None:
            nonlocal under_way, flying, shipped
            under_way, flying, shipped = under_way + part, flying + 1, shipped + 1
            load = under_way + sum(left[: max(WINDOW - flying, 0)])
            started, is_open = self.now, [True]
            allowed = self.patience.seconds(load)

            def settled(came: bool) -> None:
                nonlocal under_way, flying, window
                if not is_open:
                    return
                is_open.clear()
                under_way, flying, window = under_way - part, flying - 1, WINDOW if came else 1
                if came:
                    self.patience.took(self.now - started, load)
                else:
                    self.patience.passed(load, allowed)
                    self.again += 1
                    left.insert(0, part)

            def arrived() -> None:
                self._at(max(self.now, self._free[0]) + 0.05, lambda: settled(True))

            if shipped - 1 != lost:
                self._at(self._arrival(part), arrived)
            self._at(self.now + allowed, lambda: settled(False))

        while left or flying:
            while left and flying < window:
                ship(left.pop(0))
            self.now, _, what = heapq.heappop(self._events)
            what()
        return self.now - began


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("mbit", [1, 2, 10, 100, 1000])
def test_nothing_goes_twice_where_the_line_has_a_megabit(mbit: float, hops: int, noise: float) -> None:
    line = SlowLine(lambda at: mbit * MBIT, hops, noise)
    for size in (100, 8 * CHUNK, 1000, CHUNK // 2, 3 * CHUNK + 5, 20 * CHUNK):
        line.send(size)
    assert line.again == 0


@pytest.mark.parametrize("mbit", [0.1, 0.2, 0.4])
def test_of_a_slower_one_little_goes_twice_until_it_is_known(mbit: float) -> None:
    """What the guess was too short for, and its backoff."""
    line = SlowLine(lambda at: mbit * MBIT, noise=0.3)
    line.send(8 * CHUNK)
    first, line.again = line.again, 0
    line.send(20 * CHUNK)
    print(f"{mbit} Mbit/s: {first} chunks again of the first 8, then {line.again} of 20")
    assert first <= 8 and line.again <= 1


def test_a_line_that_becomes_slower() -> None:
    """To a half: none goes twice. To a hundredth of that: while that is learned."""
    line = SlowLine(lambda at: 100 * MBIT if at < 3 else 50 * MBIT if at < 20 else 0.6 * MBIT)
    line.send(20 * CHUNK)
    line.now = 3.0
    line.send(20 * CHUNK)
    assert line.again == 0
    line.now, again = 20.0, list[int]()
    for _ in range(4):
        line.again = 0
        line.send(20 * CHUNK)
        again.append(line.again)
    print(f"again, of 20 each: {again}")
    assert 0 < sum(again) <= 20 and again[-1] == 0


@pytest.mark.parametrize("mbit", [1, 10, 1000])
def test_what_is_lost_goes_again_soon(mbit: float) -> None:
    """After a few times what it takes; after `SHORTEST` on a fast line."""
    line = SlowLine(lambda at: mbit * MBIT)
    whole = line.send(8 * CHUNK)
    assert line.send(8 * CHUNK, lost=7) <= max(5 * whole, 2 * SHORTEST) and line.again == 1


def test_receipts_of_small_messages_end_a_backoff_and_say_nothing_of_the_rate() -> None:
    patience = Patience()
    for times in (1, 2, 4, 8, 16):
        assert patience.seconds(8) == pytest.approx(times * SHORTEST, rel=0.01)
        patience.passed(8, patience.seconds(8))
    for _ in range(40):
        patience.took(0.01, 1000)
    assert patience.seconds(8) == pytest.approx(SHORTEST, rel=0.01) and patience.seconds(CHUNK) > 16.0


def test_of_chunks_that_were_late_together_one_counts() -> None:
    patience = Patience()
    allowed = [patience.seconds(load) for load in (CHUNK, 2 * CHUNK, 3 * CHUNK)]
    for load, seconds in zip((CHUNK, 2 * CHUNK, 3 * CHUNK), allowed, strict=True):
        patience.passed(load, seconds)
    assert patience.seconds(CHUNK) == 2 * allowed[0]


class Paced:
    """What a worker ships, one chunk behind the other at `rate` bytes per second, whoever it is for."""

    def __init__(self, rate: float) -> None:
        self.rank, self.resent, self.under_way = 0, 0, UnderWay()
        self._rate, self._free, self._lock = rate, 0.0, threading.Lock()

    def introduction(self, peer: int) -> bytes | None:
        return bytes(16)

    def passed(self, peer: int, tag: Tag) -> None:
        raise AssertionError

    def ship(self, peer: int, chunk: bytes, head: bytes, answered: Answered, seconds: float) -> None:
        with self._lock:
            now = time.monotonic()
            self._free = max(now, self._free) + len(chunk) / self._rate
            takes = self._free - now
        outcome = (b"", None) if takes < seconds else (None, None)
        threading.Timer(min(takes, seconds), answered, outcome).start()


def test_chunks_to_all_peers_share_a_line() -> None:
    """Of 8 Mbit/s, to three peers at once: what is queued for others counts."""
    line = Paced(8 * MBIT)
    messages = [OutgoingMessage(PostedWork(peer, None, time.monotonic), np.zeros(CHUNK, np.uint8), Tag("outer", 1), 1)
                for peer in (1, 2, 3)]  # fmt: skip
    for message in messages:
        peer = message.work.peer
        assert peer is not None
        Outgoing(line, peer).add(message)
    until = time.monotonic() + 30.0
    while not all(message.work.done() for message in messages) and time.monotonic() < until:
        time.sleep(0.01)
    assert all(message.work.done() and message.work.error is None for message in messages)
    assert line.resent == 0 and line.under_way.add(0) == 0
