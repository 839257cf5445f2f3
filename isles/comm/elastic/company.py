"""A worker's line to the lighthouse.

    beats       from a thread of its own, every second and at the start of each round, one at a time
    told        what the lighthouse pushes (proposals, views, words on rounds), in the session's thread
    reports     lines of metrics, in order; kept while the lighthouse is away

Everything else is called by the training thread, and never waits for the lighthouse longer than it says. One lock
guards the `Member`, the state machine that all three threads share.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import override

from isles.comm.elastic.ballot import Word
from isles.comm.elastic.keys import ASKED, REPORTED, signature, told_at
from isles.comm.elastic.line import SOON, LighthouseLine
from isles.comm.elastic.links.reports import Reports
from isles.comm.elastic.messages import BeatReply, Entry, Failed, Over, Refusal, Silent, decode, encode
from isles.comm.elastic.session import IncomingQuery, Session
from isles.comm.elastic.told import LONGEST, Orders

_LOG = logging.getLogger(__name__)
_BEAT = 1.0  # seconds between beats; SOON while this worker waits for its first round
_PATIENCE = 3.0  # seconds for an answer
_QUIET = 3.0  # seconds for which nobody waits for one that is said to be silent


class SeatLine(ABC):
    """What the worker in the seat of `entry` says to the lighthouse. Whoever derives from it starts `_thread`."""

    def __init__(self, session: Session, entry: Entry) -> None:
        self._session, self._entry, self._closed = session, entry, False
        self._changed = threading.Condition(threading.RLock())
        self._reports = Reports(lambda line: self.ask(line, key=REPORTED) is not None)
        self._thread = threading.Thread(target=self._beat_on, name="isles-beats", daemon=True)

    def report(self, event: Mapping[str, Any]) -> None:
        """Have the lighthouse note a line of metrics or another event. Returns at once."""
        self._reports.add(event)

    def reported(self, seconds: float) -> None:
        """Wait until all reports have been taken, `seconds` at most."""
        self._reports.settle(seconds)

    def ask(self, message: Any, seconds: float = _PATIENCE, key: str = ASKED) -> Any:
        """The lighthouse's answer; None where none comes in time, or it has none. Not for the session's thread."""
        return ask(self._session, self._entry, message, seconds, key)

    def close(self) -> None:
        """End the threads. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._reports.close()
        self._thread.join(_PATIENCE + 2.0)

    @abstractmethod
    def _beat_on(self) -> None:
        """Say now and then that this worker is there, until `_closed`."""


class Company(SeatLine, LighthouseLine):
    """The line of the worker in the seat of `entry`."""

    def __init__(self, session: Session, entry: Entry) -> None:
        SeatLine.__init__(self, session, entry)
        LighthouseLine.__init__(self, entry.seat, self._changed)
        self._answered_at, self._poked = -math.inf, False
        self.left_behind: Callable[[int], None] = lambda seat: None
        """Called with a seat once a view without it is on its way, though it did not ask to leave."""
        self._given_up: frozenset[int] = frozenset()
        self.fell_silent: Callable[[int], None] = lambda seat: None
        """Called with a seat that gives no sign of life, in the session's thread."""
        self._silent: dict[int, float] = {}  # until when
        self.begun_again: Callable[[Word], None] = lambda word: None
        """Called with the word on another attempt, in the session's thread."""
        self.failed: Callable[[int, int], None] = lambda round, attempt: None
        """Called with (round, attempt) of which another worker of this island has no answer, likewise."""
        self._orders = Orders(session, entry, 0)
        session.serve(told_at(entry.seat, 0), self._told)
        self._thread.start()

    # What the training thread asks

    @override
    def is_silent(self, seat: int) -> bool:
        return time.monotonic() < self._silent.get(seat, 0.0)

    def doubt(self, seat: int) -> None:
        """Nothing comes from `seat`, which is waited for: does the lighthouse hear it?"""
        self.say(Silent(seat))

    @property
    @override
    def has_answers(self) -> bool:
        return time.monotonic() - self._answered_at < _PATIENCE

    def connection(self, seat: int, *, broken: bool) -> None:
        """What the network says of `seat`."""
        with self._changed:
            self.member.connection(seat, broken=broken)
            self._changed.notify_all()

    @override
    def wait(self, over: Callable[[], bool], seconds: float) -> bool:
        began = time.monotonic()
        with self._changed:
            is_over = self._changed.wait_for(over, seconds)
            self.waited += time.monotonic() - began
        return is_over

    # Threads

    @override
    def poke(self) -> None:
        self._poked = True
        self._changed.notify_all()

    @override
    def _beat_on(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                self._poked = False
                beat = self.member.beat()
            began = time.monotonic()
            answer, ack = self.ask(beat), None
            with self._changed:
                if isinstance(answer, BeatReply):
                    self._answers, self._answered_at = True, time.monotonic()
                    ack = self.member.answered(beat, answer)
                elif isinstance(answer, Refusal):
                    self.ended = self.ended or Over(answer.reason)
                self._changed.notify_all()
            self._give_up()
            if ack is not None:
                self.ask(ack)
            with self._changed:
                pause = (_BEAT if self._training else SOON) - (time.monotonic() - began)
                self._changed.wait_for(lambda: self._poked or self._closed, max(pause, 0.01))

    def _give_up(self) -> None:
        """Call `left_behind` for each seat that a view on its way goes on without."""
        with self._changed:
            before, self._given_up = self._given_up, self.member.given_up()
            new = self._given_up - before
        for seat in new:
            self.left_behind(seat)

    def _told(self, query: IncomingQuery) -> None:
        """Take in an order of the lighthouse. In the session's thread, so nothing here waits."""
        message = self._orders.take(query)
        if message is None:
            return
        if isinstance(message, Silent):
            self._note_silent(message.seat)
            return
        if isinstance(message, Failed):
            self.failed(message.round, message.attempt)
            return
        with self._changed:
            if message == self._load:  # said again: another beat would only have it said once more
                return
            ack = self.take_in(message)
            self.poke()
        self._give_up()
        if isinstance(message, Word):
            self.begun_again(message)
        if ack is not None:
            self.say(ack)

    def _note_silent(self, seat: int) -> None:
        now = time.monotonic()
        self._silent = {other: end for other, end in self._silent.items() if end > now} | {seat: now + _QUIET}
        self.fell_silent(seat)

    @override
    def say(self, message: Any) -> None:
        def answered(reply: bytes | None, refusal: bytes | None) -> None:
            try:
                word = decode(reply, limit=LONGEST) if reply else None
            except ValueError as error:
                _LOG.warning("the lighthouse: %s", error)
                return
            if isinstance(word, Word):
                with self._changed:
                    self.words.hear(word)
                    self._changed.notify_all()

        said = encode(message)
        word = signature(self._entry.seat, self._entry.key, ASKED, said)
        try:
            self._session.ask(ASKED, said, answered, attachment=word, seconds=_PATIENCE, urgent=True)
        except OSError:
            _LOG.debug("the session is closed")


def ask(session: Session, entry: Entry, message: Any, seconds: float = _PATIENCE, key: str = ASKED) -> Any:
    """What the lighthouse answers to `message` of the seat of `entry`; see `Company.ask`."""
    said = message if isinstance(message, bytes) else encode(message)
    word = signature(entry.seat, entry.key, key, said)
    try:
        reply, _ = session.answer(key, said, attachment=word, seconds=seconds, urgent=True)
    except OSError:
        return None
    if not reply:
        return None if reply is None else True
    try:
        return decode(reply, limit=LONGEST)
    except ValueError as error:
        _LOG.warning("the lighthouse: %s", error)
        return None
