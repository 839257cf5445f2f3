"""A worker's line to the lighthouse, over a session.

    beats       by a timer, every second and at the start of each round, one at a time
    told        what the lighthouse pushes (proposals, views, words on rounds), in a callback of the session
    reports     lines of metrics, in order; kept while the lighthouse is away

Everything else is called by the training thread, and never waits for the lighthouse longer than it says. One condition
guards the `Member`, the state machine that both share. No thread is begun here, and no clock read but the session's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from typing_extensions import override

from isles.comm.elastic.ballot import Word
from isles.comm.elastic.control import ControlSession, Query, Timer
from isles.comm.elastic.keys import told_at
from isles.comm.elastic.line import SOON, LighthouseLine
from isles.comm.elastic.messages import Beat, BeatReply, Entry, Failed, Over, Refusal, Silent
from isles.comm.elastic.told import BEAT, PATIENCE, Orders, SeatLine

_QUIET = 3.0  # seconds for which nobody waits for one that is said to be silent
_AGAIN = 0.01  # seconds, at least, from an answer to the next beat


class Company(SeatLine, LighthouseLine):
    """The line of the worker in the seat of `entry`."""

    def __init__(self, session: ControlSession, entry: Entry) -> None:
        SeatLine.__init__(self, session, entry)
        LighthouseLine.__init__(self, entry.seat, self.changed)
        self._answered_at = -math.inf
        self._is_asking = self._again = False
        self._next: Timer | None = None
        self.left_behind: Callable[[int], None] = lambda seat: None
        """Called with a seat once a view without it is on its way, though it did not ask to leave."""
        self._given_up: frozenset[int] = frozenset()
        self.fell_silent: Callable[[int], None] = lambda seat: None
        """Called with a seat that gives no sign of life, in a callback."""
        self._silent: dict[int, float] = {}  # until when
        self.begun_again: Callable[[Word], None] = lambda word: None
        """Called with the word on another attempt, in a callback."""
        self.failed: Callable[[int, int], None] = lambda round, attempt: None
        """Called with (round, attempt) of which another worker of this island has no answer, likewise."""
        self._orders = Orders(session, entry, 0)
        session.serve(told_at(entry.seat, 0), self._told)
        with self.changed:
            self.poke()

    # What the training thread asks

    @override
    def is_silent(self, seat: int) -> bool:
        return self.session.now() < self._silent.get(seat, -math.inf)

    def doubt(self, seat: int) -> None:
        """Nothing comes from `seat`, which is waited for: does the lighthouse hear it?"""
        self.say(Silent(seat))

    @property
    @override
    def has_answers(self) -> bool:
        return self.session.now() - self._answered_at < PATIENCE

    def connection(self, seat: int, *, broken: bool) -> None:
        """What the network says of `seat`."""
        with self.changed:
            self.member.connection(seat, broken=broken)
            self.changed.notify_all()

    @override
    def say(self, message: Any) -> None:
        def answered(answer: Any) -> None:
            if isinstance(answer, Word):
                with self.changed:
                    self.words.hear(answer)
                    self.changed.notify_all()

        self.send(message, answered)

    @override
    def close(self) -> None:
        with self.changed:
            if self._next is not None:
                self._next.cancel()
        super().close()

    # Beats

    @override
    def poke(self) -> None:
        if self._is_asking or self._closed:
            self._again = True
            return
        if self._next is not None:
            self._next.cancel()
        self._is_asking, self._again = True, False
        beat = self.member.beat()
        self.send(beat, partial(self._answered, beat, self.session.now()))

    def _answered(self, beat: Beat, began: float, answer: Any) -> None:
        ack = None
        with self.changed:
            self._is_asking = False
            if isinstance(answer, BeatReply):
                self._answers, self._answered_at = True, self.session.now()
                ack = self.member.answered(beat, answer)
            elif isinstance(answer, Refusal):
                self.ended = self.ended or Over(answer.reason)
            self.changed.notify_all()
        self._give_up()
        if ack is not None:
            self.say(ack)
        with self.changed:
            if self._again:
                self.poke()
            elif not self._closed:
                pause = (BEAT if self._training else SOON) - (self.session.now() - began)
                self._next = self.session.later(self._beat, max(pause, _AGAIN))

    def _beat(self) -> None:
        with self.changed:
            self.poke()

    # Orders

    def _give_up(self) -> None:
        """Call `left_behind` for each seat that a view on its way goes on without."""
        with self.changed:
            before, self._given_up = self._given_up, self.member.given_up()
            new = self._given_up - before
        for seat in new:
            self.left_behind(seat)

    def _told(self, query: Query) -> None:
        """Take in an order of the lighthouse."""
        message = self._orders.take(query)
        if message is None:
            return
        if isinstance(message, Silent):
            self._note_silent(message.seat)
            return
        if isinstance(message, Failed):
            self.failed(message.round, message.attempt)
            return
        with self.changed:
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
        now = self.session.now()
        self._silent = {other: end for other, end in self._silent.items() if end > now} | {seat: now + _QUIET}
        self.fell_silent(seat)
