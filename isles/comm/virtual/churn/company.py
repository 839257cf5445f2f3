"""A worker's line to the lighthouse on the virtual clock: what `isles.comm.elastic.company.Company` is between
processes, with events in the place of its threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from isles.comm.elastic.ballot import Word
from isles.comm.elastic.line import Words
from isles.comm.elastic.member import Member, Standing
from isles.comm.elastic.messages import BeatReply, Examine, Leave, Load, Over, Proposal, Refusal, Reload
from isles.comm.view import View
from isles.comm.virtual.events import ARRIVED, DEADLINE
from isles.comm.virtual.scheduler import VirtualWorker

_SOON, _PATIENCE = 0.2, 3.0  # seconds, as between processes


class Asking(Protocol):
    """What a worker needs of the lighthouse."""

    def ask(self, seat: int, message: Any, answered: Callable[[Any], None]) -> None: ...


class _Sleep:
    """What a worker that waits is blocked on."""

    error: BaseException | None = None

    def fail(self, error: Exception) -> None:
        """Nobody is left who could wake it."""
        self.error = error


class VirtualCompany:
    """`worker` in the seat of its rank. leaving: set where it is to leave. reports: what it said, as it comes."""

    def __init__(self, line: Asking, worker: VirtualWorker) -> None:
        self.seat = worker.rank
        self.member = Member(self.seat)
        self.ended: Over | Examine | None = None
        self.leaving = threading.Event()
        self.is_dead = False
        self.heard: Callable[[int, Mapping[str, Any]], None] = lambda seat, event: None
        self.waited = 0.0
        self._line, self._worker = line, worker
        self._sleep: _Sleep | None = None
        self._load: Load | None = None
        self._training = self._asking = self._again = False
        self._has_answers = True
        self.words = Words()

    @property
    def turn(self) -> VirtualWorker:
        """This worker's, as a context: in it nobody else acts."""
        return self._worker

    @property
    def is_away(self) -> bool:
        """Whether it is paused or dead now."""
        now = self._worker.scheduler.timeline.now
        return self.is_dead or self._worker.back(now) > now

    # What the training thread asks, see `LighthouseLine`

    def begin(self, round: int) -> View | None:
        """See `Company.begin`."""
        if self._has_answers and not self.wait(lambda: self._may_begin(round), _SOON):
            self._has_answers = False
        with self._worker:
            view = self.member.begin(round)
            self._training = True
            self.poke()
        return view

    def _may_begin(self, round: int) -> bool:
        return self.member.is_known(round) or self.member.call != self.member.ready or self.ended is not None

    def skip(self, round: int) -> None:
        """See `Company.skip`."""
        with self._worker:
            self.member.skip(round)
            self.poke()

    def standing(self, round: int) -> Standing:
        """See `Company.standing`."""
        with self._worker:
            return self.member.group(round)

    def lost(self, seat: int) -> bool:
        """See `Company.lost`."""
        with self._worker:
            return self.member.lost(seat)

    def is_silent(self, seat: int) -> bool:
        """Nobody is asked: patience ends by itself."""
        return False

    def accepts(self, round: int, seats: Sequence[int]) -> bool:
        """See `Company.accepts`."""
        with self._worker:
            return self.member.accept(round, seats)

    @property
    def is_called(self) -> bool:
        """See `Company.is_called`."""
        with self._worker:
            return self.member.call != self.member.ready

    @property
    def is_over(self) -> bool:
        """See `Company.is_over`."""
        return self._is_off()

    @property
    def has_answers(self) -> bool:
        """See `Company.has_answers`."""
        return self._has_answers

    def landed(self, word: Word) -> None:
        """See `Company.landed`."""
        with self._worker:
            self.member.landed(word)
            self.words.forget_before(word.round)

    @property
    def is_waiting(self) -> bool:
        """Whether it is there and not in a round."""
        return not self._training and not self.is_dead and self.ended is None

    def load(self, seconds: float) -> Load | None:
        """See `Company.load`."""
        with self._worker:
            self._training = False
            self.poke()
        self.wait(lambda: self._is_asked() or self.ended is not None, seconds)
        with self._worker:
            return self._load if self._is_asked() else None

    def _is_asked(self) -> bool:
        return self._load is not None and self._load.call > self.member.ready

    def loaded(self, load: Load, round: int, left_out: Mapping[int, int]) -> None:
        """See `Company.loaded`."""
        with self._worker:
            self.member.loaded(load, round, left_out)
            self._load = None
            self.poke()

    def reload(self) -> None:
        """See `Company.reload`."""
        with self._worker:
            self._load = None
        self.ask(Reload())

    def first(self, seconds: float, ahead: int = 0) -> int | None:
        """See `Company.first`."""
        self.wait(lambda: self.member.first(ahead) is not None or self._is_off(), seconds)
        with self._worker:
            return None if self.member.call != self.member.ready else self.member.first(ahead)

    def _is_off(self) -> bool:
        return self.member.call != self.member.ready or self.ended is not None

    def until(self) -> int | None:
        """See `Company.until`."""
        with self._worker:
            return self.member.until()

    def left_out(self) -> dict[int, int]:
        """See `Company.left_out`."""
        with self._worker:
            return dict(self.member.left_out)

    def leaves_out(self, others: Mapping[int, int]) -> None:
        """See `Company.leaves_out`."""
        with self._worker:
            self.member.left_out |= others

    def pace(self, seconds: float) -> None:
        """See `Company.pace`."""
        with self._worker:
            is_new, self.member.seconds = not self.member.seconds, seconds
            if is_new:
                self.poke()

    def leave(self) -> bool:
        """See `Company.leave`."""
        return self.ask(Leave()) is not None

    def report(self, event: Mapping[str, Any]) -> None:
        """See `Company.report`."""
        with self._worker:
            self.heard(self.seat, event)

    def reported(self, seconds: float) -> None:
        """Whatever is reported is heard at once."""

    def ask(self, message: Any, seconds: float = _PATIENCE) -> Any:
        """See `Company.ask`."""
        answers: list[Any] = []

        def answered(reply: Any) -> None:
            answers.append(reply)
            self.changed()

        with self._worker:
            self._line.ask(self.seat, message, answered)
        self.wait(lambda: bool(answers), seconds)
        return answers[0] if answers else None

    def say(self, message: Any) -> None:
        """See `Company.say`."""

        def answered(reply: Any) -> None:
            if isinstance(reply, Word):
                self.words.hear(reply)
                self.changed()

        with self._worker:
            self._line.ask(self.seat, message, answered)

    def wait(self, over: Callable[[], bool], seconds: float) -> bool:
        """See `Company.wait`."""
        worker = self._worker
        timeline, began, until = worker.scheduler.timeline, worker.clock, worker.clock + seconds
        while True:
            with worker:
                is_over = over()
                if is_over or worker.clock >= until:
                    self.waited += worker.clock - began
                    return is_over
                sleep = self._sleep = _Sleep()
                end = timeline.at(worker.back(until), DEADLINE, self.seat, partial(self._wake, sleep))
                worker.scheduler.block(worker, sleep)
                timeline.cancel(end)
                if sleep.error is not None:
                    raise sleep.error

    # Events

    def connection(self, seat: int, *, broken: bool) -> None:
        """What the network says of `seat`."""
        self.member.connection(seat, broken=broken)

    def told(self, message: Any) -> None:
        """The lighthouse says something."""
        if message == self._load:  # said again: another beat would only have it said once more
            return
        match message:
            case Proposal():
                ack = self.member.proposed(message)
                if ack is not None:
                    self._line.ask(self.seat, ack, _ignored)
            case View():
                self.member.told(message)
            case Word():
                self.words.hear(message)
            case Load():
                self._load = message
                self.member.call = max(self.member.call, message.call)
            case Over() | Examine():
                self.ended = message
            case Refusal(reason=reason):
                self.ended = Over(reason)
        self.poke()
        self.changed()

    def poke(self) -> None:
        """Beat, now or after the answer that is awaited."""
        if self._asking:
            self._again = True
            return
        self._asking, self._again = True, False
        beat = self.member.beat()
        self._line.ask(self.seat, beat, partial(self._answered, beat))

    def _answered(self, beat: Any, answer: Any) -> None:
        self._asking = False
        if isinstance(answer, BeatReply):
            self._has_answers = True
            ack = self.member.answered(beat, answer)
            if ack is not None:
                self._line.ask(self.seat, ack, _ignored)
        elif isinstance(answer, Refusal):
            self.ended = self.ended or Over(answer.reason)
        if (self._again or answer is None) and self.ended is None:
            self.poke()
        self.changed()

    def changed(self) -> None:
        """Whoever waits is to look again."""
        if self._sleep is not None:
            self._wake(self._sleep)

    def _wake(self, sleep: _Sleep) -> None:
        worker, timeline = self._worker, self._worker.scheduler.timeline
        if worker.awaits is not sleep:
            return
        back = worker.back(timeline.now)
        if back > timeline.now:  # a paused worker hears of it when it is back
            timeline.at(back, ARRIVED, self.seat, partial(self._wake, sleep))
            return
        self._sleep = None
        worker.scheduler.wake(worker)


def _ignored(answer: Any) -> None:
    """An answer that says nothing."""
