"""The line of a swarm's peer to its lighthouse: it asks what to do, says each second what it does, and tells of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from isles.comm.elastic.control import ControlSession
from isles.comm.elastic.line import BEAT, SeatLine
from isles.comm.elastic.messages import Entry, Find, Over, Refusal
from isles.comm.elastic.swarm.words import Apart, Begin, Enter, Seek, StatesKept, SwarmBeat, Wait

_AGAIN = 0.1  # seconds between looks while something is waited for
SwarmPart = Begin | Enter | Wait | Over | Apart | Refusal


class SwarmLine(SeatLine):
    """Of the peer in the seat of `entry`. ended: what the lighthouse said last, where this peer has no part in the run
    any more. kept: the newest step of which it has said that it keeps all states. is_away: whether it has not answered
    lately. met: called with a peer that is there (again), in some thread.
    """

    def __init__(self, session: ControlSession, entry: Entry, met: Callable[[int], None] = lambda seat: None) -> None:
        super().__init__(session, entry)
        self.seat, self._met = entry.seat, met
        self.ended: Over | Apart | Refusal | None = None
        self.kept, self.is_away = 0, False
        self._beat: Callable[[], SwarmBeat | None] = lambda: None
        session.later(self._beat_on, BEAT)

    def part(self, stage: int, run: int) -> SwarmPart | None:
        """What this peer is to do, which wishes to serve `stage`; None where the lighthouse does not answer."""
        answer = self.ask(Seek(stage, run))
        self._hear(answer)
        return answer if isinstance(answer, SwarmPart) else None

    def at_work(self, beat: Callable[[], SwarmBeat | None]) -> None:
        """Say from now on, each second, what `beat` is then."""
        self._beat = beat

    def rest(self, seconds: float) -> None:
        """Wait until this peer has no further part in the run, or `seconds` have passed."""
        self.wait(lambda: self.ended is not None, seconds)

    def await_kept(self, step: int, seconds: float, *, though_away: bool = False) -> bool:
        """Wait until the lighthouse keeps the states of after `step` or of a later one; whether it does. `seconds` at
        most, and unless `though_away` no longer than it answers.
        """
        until = self.session.now() + seconds
        while self.kept < step and self.ended is None and (though_away or not self.is_away):
            if self.session.now() >= until:
                break
            self.look()
            if self.kept < step:
                self.rest(_AGAIN)
        return self.kept >= step

    @override
    def connection(self, seat: int, *, broken: bool) -> None:
        if not broken:
            self._met(seat)

    @override
    def doubt(self, seat: int) -> None:
        """Peers of a swarm ask each other."""

    def look(self) -> None:
        """Ask now whether this peer has a part in the run."""
        beat = self._beat()
        if beat is not None:
            self._hear(self.ask(beat))

    def _hear(self, answer: Any) -> None:
        with self.changed:
            self.is_away = answer is None
            if isinstance(answer, StatesKept):
                self.kept = max(self.kept, answer.step)
            if isinstance(answer, Over | Apart | Refusal):
                self.ended = self.ended or answer
            self.changed.notify_all()

    def _beat_on(self) -> None:
        beat = self._beat()

        def answered(answer: Any) -> None:
            if beat is not None:
                self._hear(answer)
            self.session.later(self._beat_on, BEAT)

        if not self._closed:  # a model that is being made, or a state that is on its way, takes its time
            self.send(Find(self.seat) if beat is None else beat, answered)
