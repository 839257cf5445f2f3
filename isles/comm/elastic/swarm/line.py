"""The line of a swarm's peer to its lighthouse: it asks what to do, says each second what it does, and tells of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from isles.comm.elastic.company import ask
from isles.comm.elastic.keys import REPORTED
from isles.comm.elastic.links.reports import Reports
from isles.comm.elastic.messages import Entry, Find, Over, Refusal
from isles.comm.elastic.session import Session
from isles.comm.elastic.swarm.words import Apart, Begin, Enter, Seek, StatesKept, SwarmBeat, Wait

_BEAT = 1.0  # seconds
_PATIENCE = 3.0  # seconds for an answer
_AGAIN = 0.1  # seconds between looks while something is waited for
SwarmPart = Begin | Enter | Wait | Over | Apart | Refusal


class SwarmLine:
    """Of the peer in the seat of `entry`. ended: what the lighthouse said last, where this peer has no part in the run
    any more. kept: the newest step of which it has said that it keeps all states. is_away: whether it has not answered
    lately.
    """

    def __init__(self, session: Session, entry: Entry) -> None:
        self.seat = entry.seat
        self.ended: Over | Apart | Refusal | None = None
        self.kept, self.is_away = 0, False
        self._session, self._entry = session, entry
        self._reports = Reports(lambda line: self.ask(line, key=REPORTED) is not None)
        self._changed = threading.Condition()
        self._beat: Callable[[], SwarmBeat | None] = lambda: None
        self._closed = False
        self._thread = threading.Thread(target=self._beat_on, name="isles-beats", daemon=True)
        self._thread.start()

    def part(self, stage: int, run: int) -> SwarmPart | None:
        """What this peer is to do, which wishes to serve `stage`; None where the lighthouse does not answer."""
        answer = self.ask(Seek(stage, run))
        self._hear(answer)
        return answer if isinstance(answer, SwarmPart) else None

    def at_work(self, beat: Callable[[], SwarmBeat | None]) -> None:
        """Say from now on, each second, what `beat` is then."""
        with self._changed:
            self._beat = beat
            self._changed.notify_all()

    def report(self, event: Mapping[str, Any]) -> None:
        """Have the lighthouse note a line of metrics or a word."""
        self._reports.add(event)

    def reported(self, seconds: float) -> None:
        """Wait until all reports have been taken, `seconds` at most."""
        self._reports.settle(seconds)

    def ask(self, message: Any, seconds: float = _PATIENCE, key: str | None = None) -> Any:
        """As `isles.comm.elastic.company.Company.ask`."""
        where = {} if key is None else {"key": key}
        return ask(self._session, self._entry, message, seconds, **where)

    def wait(self, seconds: float) -> None:
        """Wait until this peer has no further part in the run, or `seconds` have passed."""
        with self._changed:
            self._changed.wait_for(lambda: self.ended is not None, seconds)

    def await_kept(self, step: int, seconds: float, *, though_away: bool = False) -> bool:
        """Wait until the lighthouse keeps the states of after `step` or of a later one; whether it does. `seconds` at
        most, and unless `though_away` no longer than it answers.
        """
        until = time.monotonic() + seconds
        while self.kept < step and self.ended is None and (though_away or not self.is_away):
            if time.monotonic() >= until:
                break
            self.look()
            if self.kept < step:
                self.wait(_AGAIN)
        return self.kept >= step

    def close(self) -> None:
        """End the threads. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._reports.close()
        self._thread.join(_PATIENCE + 2.0)

    def _hear(self, answer: Any) -> None:
        self.is_away = answer is None
        if isinstance(answer, StatesKept):
            self.kept = max(self.kept, answer.step)
        if isinstance(answer, Over | Apart | Refusal):
            with self._changed:
                self.ended = self.ended or answer
                self._changed.notify_all()

    def look(self) -> None:
        """Ask now whether this peer has a part in the run."""
        with self._changed:
            beat = self._beat()
        if beat is not None:
            self._hear(self.ask(beat))

    def _beat_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, _BEAT)
                if self._closed:
                    return
            with self._changed:
                is_at_work = self._beat() is not None
            if is_at_work:
                self.look()
            else:  # a model that is being made, or a state that is on its way, takes its time
                self.ask(Find(self.seat))
