"""A worker's line to the lighthouse on the virtual clock: what `isles.comm.elastic.company.Company` is between
processes, with events in the place of its threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from typing_extensions import override

from isles.comm.elastic.ballot import Word
from isles.comm.elastic.line import LighthouseLine
from isles.comm.elastic.messages import BeatReply, Over, Refusal
from isles.comm.virtual.scheduler import VirtualWorker
from isles.network.engine import ARRIVED, LAST

_PATIENCE = 3.0  # seconds, as between processes


class Asking(Protocol):
    """What a worker needs of the lighthouse."""

    def ask(self, seat: int, message: Any, answered: Callable[[Any], None]) -> None: ...


class _Sleep:
    """What a worker that waits is blocked on."""

    error: BaseException | None = None

    def fail(self, error: Exception) -> None:
        """Nobody is left who could wake it."""
        self.error = error


class VirtualCompany(LighthouseLine):
    """`worker` in the seat of its rank. leaving: set where it is to leave. reports: what it said, as it comes."""

    def __init__(self, line: Asking, worker: VirtualWorker) -> None:
        super().__init__(worker.rank, worker)
        self.leaving = threading.Event()
        self.is_dead = False
        self.heard: Callable[[int, Mapping[str, Any]], None] = lambda seat, event: None
        self._line, self._worker = line, worker
        self._sleep: _Sleep | None = None
        self._asking = self._again = False

    @property
    def turn(self) -> VirtualWorker:
        """This worker's, as a context: in it nobody else acts."""
        return self._worker

    @property
    def is_away(self) -> bool:
        """Whether it is paused or dead now."""
        now = self._worker.scheduler.timeline.now
        return self.is_dead or self._worker.back(now) > now

    # What the training thread asks

    @property
    @override
    def has_answers(self) -> bool:
        return self._answers

    @property
    def is_waiting(self) -> bool:
        """Whether it is there and not in a round."""
        return not self._training and not self.is_dead and self.ended is None

    @override
    def report(self, event: Mapping[str, Any]) -> None:
        with self._worker:
            self.heard(self.seat, event)

    @override
    def reported(self, seconds: float) -> None:
        """Whatever is reported is heard at once."""

    @override
    def ask(self, message: Any, seconds: float = _PATIENCE) -> Any:
        answers: list[Any] = []

        def answered(reply: Any) -> None:
            answers.append(reply)
            self.changed()

        with self._worker:
            self._line.ask(self.seat, message, answered)
        self.wait(lambda: bool(answers), seconds)
        return answers[0] if answers else None

    @override
    def say(self, message: Any) -> None:
        def answered(reply: Any) -> None:
            if isinstance(reply, Word):
                self.words.hear(reply)
                self.changed()

        with self._worker:
            self._line.ask(self.seat, message, answered)

    @override
    def wait(self, over: Callable[[], bool], seconds: float) -> bool:
        worker = self._worker
        timeline, began, until = worker.scheduler.timeline, worker.clock, worker.clock + seconds
        while True:
            with worker:
                is_over = over()
                if is_over or worker.clock >= until:
                    self.waited += worker.clock - began
                    return is_over
                sleep = self._sleep = _Sleep()
                end = timeline.at(worker.back(until), LAST, self.seat, self._wake, sleep)
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
        ack = self.take_in(message)
        if ack is not None:
            self._line.ask(self.seat, ack, _ignored)
        self.poke()
        self.changed()

    @override
    def poke(self) -> None:
        if self._asking:
            self._again = True
            return
        self._asking, self._again = True, False
        beat = self.member.beat()
        self._line.ask(self.seat, beat, partial(self._answered, beat))

    def _answered(self, beat: Any, answer: Any) -> None:
        self._asking = False
        if isinstance(answer, BeatReply):
            self._answers = True
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
            timeline.at(back, ARRIVED, self.seat, self._wake, sleep)
            return
        self._sleep = None
        worker.scheduler.wake(worker)


def _ignored(answer: Any) -> None:
    """An answer that says nothing."""
