"""Rounds that all their members land together, or none: where workers come and go, of methods with one mean for all.

    start      among whom, and as which attempt (`Roster.start_round`)
    encode     a copy of the snapshot; what error feedback and low-rank bases were before is kept
    exchange   the answer's hash is told, or that there is none (`Roster.finish_round`)
    verdict    land; or again, from the snapshot and what was kept, among those who are left; or wait

A round whose verdict cannot be had now is put off: nothing has changed here, training goes on, and the next snapshot
holds what was learned since the last landing. An answer that waits for its verdict is landed once it is told, and what
was learned meanwhile is added again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from typing_extensions import override

from isles.comm.roster import Roster
from isles.network.planner.memory import Held
from isles.replicas.loop.courier import ToldCourier
from isles.replicas.loop.fragment import Exchange, Flight, Fragment
from isles.replicas.parts.interfaces import Composition


@dataclass(frozen=True, slots=True)
class _Kept:
    """What an attempt changes beside its buffer."""

    residual: Tensor | None
    bases: dict[str, Any]

    @classmethod
    def of(cls, fragment: Fragment) -> _Kept:
        residual = fragment.residual
        return cls(None if residual is None else residual.clone(), fragment.averaging.state_dict())

    def restore(self, fragment: Fragment) -> None:
        """Into the fragment."""
        if fragment.residual is not None and self.residual is not None:
            fragment.residual.copy_(self.residual)
        fragment.averaging.load_state_dict(self.bases)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An attempt without a verdict. answer: None where it failed; then: what it left behind; live: the weights then."""

    round: int
    attempt: int
    answer: Exchange | None
    digest: int | None
    then: _Kept
    live: Tensor | None


class AgreedCourier(ToldCourier):
    """Of one fragment whose answers land at once. Beyond the buffer an attempt takes one more vector, and a copy of the
    residual and of the bases.
    """

    def __init__(self, roster: Roster, parts: Composition) -> None:
        super().__init__(roster, parts)
        self._waiting: _Waiting | None = None
        self._sent = 0  # inner step of the last round that landed

    @override
    def extra_memory(self, fragments: Sequence[Fragment]) -> list[Held]:
        vectors = sum(fragment.anchor.nbytes for fragment in fragments)
        residuals = sum(fragment.residual.nbytes for fragment in fragments if fragment.residual is not None)
        bases = sum(fragment.averaging.held_bytes for fragment in fragments)
        return [Held("copies for another attempt", vectors + residuals + bases, "exchange")]

    @override
    def receive(self, flight: Flight, snapshot: Callable[[Fragment, Tensor], Tensor]) -> None:
        """Exchange until it lands, or put the round off."""
        fragment, kept = flight.fragment, _Kept.of(flight.fragment)
        if not self._resumed(flight):
            return
        started = self.roster.start_round(fragment.rounds)
        while started is not None:
            group, attempt = started
            answer = self.start_attempt(flight, group, round=fragment.rounds, step=flight.lands, attempt=attempt)
            digest, error = self.finish_attempt(fragment, answer)
            verdict = self.roster.finish_round(fragment.rounds, attempt, digest, error)
            if verdict == "land":
                self._land(flight, answer)
                return
            then = _Kept.of(fragment)
            kept.restore(fragment)
            started = None
            if verdict == "retry":
                started = self.roster.start_round(fragment.rounds)
            if started is None:
                live = None if error else fragment.flat.read(fragment.flat.new())
                self._waiting = _Waiting(fragment.rounds, attempt, None if error else answer, digest, then, live)
        self._put_off(flight)

    def _resumed(self, flight: Flight) -> bool:
        """Ask what became of an attempt that waits; whether another one may be made. The flight lands, or is put off,
        where not.
        """
        fragment, waiting, self._waiting = flight.fragment, self._waiting, None
        if waiting is None or waiting.round != fragment.rounds:
            return True
        verdict = self.roster.finish_round(waiting.round, waiting.attempt, waiting.digest)
        if verdict == "retry":
            return True
        if verdict == "land" and waiting.answer is not None and waiting.live is not None:
            waiting.then.restore(fragment)
            learned = fragment.flat.read(fragment.flat.new()).sub_(waiting.live)
            self._land(flight, waiting.answer)
            flight.payload.since = learned
            return False
        self._waiting = waiting
        self._put_off(flight)
        return False

    def _land(self, flight: Flight, answer: Exchange) -> None:
        """The copy that was not sent is spare; those of attempts that failed may still be on their way to somebody."""
        flight.fragment.release(flight)
        flight.payload = flight.fragment.latest = answer
        self._sent = flight.lands
        self._balance(flight.fragment, answer)

    def _put_off(self, flight: Flight) -> None:
        """As if the round had not been."""
        fragment = flight.fragment
        fragment.release(flight)
        fragment.rounds, fragment.sent = fragment.rounds - 1, self._sent
        flight.payload.put_off = True
