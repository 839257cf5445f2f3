"""What each worker of a run did, from the run's record, so that it can be done again (`repeating`).

A worker whose work others have used in a round that it did not live to tell of does that round too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from isles.comm.elastic.messages import from_plain
from isles.comm.elastic.record import ALONE, LATE, WHOLE, RoundLine, StartLine
from isles.comm.view import View

_LOST = "PeerLost"


@dataclass(frozen=True)
class RecordedLife:
    """A worker from one state that it began with to the next. rounds: in their order."""

    start: StartLine
    rounds: list[RoundLine] = field(default_factory=list)


@dataclass(frozen=True)
class Script:
    """lives: by seat. views: by number."""

    lives: Mapping[int, Sequence[RecordedLife]]
    views: Mapping[int, View]

    def line(self, seat: int, round: int) -> RoundLine | None:
        """The last time that `seat` was in `round`."""
        found = (line for life in self.lives.get(seat, ()) for line in life.rounds if line.round == round)
        return next(iter([*found][::-1]), None)


def script(entries: Iterable[Mapping[str, Any]], lines: Iterable[RoundLine | StartLine], *, agrees: bool) -> Script:
    """Of the journal's entries and the lines of exchanges. agrees: of a method of one mean for all.

    ValueError, in one line, for what cannot be repeated.
    """
    views: dict[int, View] = {}
    for entry in entries:
        if entry["event"] == "view":
            view = from_plain(entry["view"])
            views[view.number] = view
    lives: dict[int, list[RecordedLife]] = {}
    for line in lines:
        own = lives.setdefault(line.seat, [])
        if isinstance(line, StartLine):
            if line.donor < 0 and line.has:
                raise ValueError(
                    f"worker {line.seat} began with a state from the lighthouse's disk, which is not kept: only runs "
                    "that never lost all of their workers can be repeated"
                )
            own.append(RecordedLife(line))
        elif own:
            own[-1].rounds.append(line)
    for own in lives.values():
        for number, life in enumerate(own):
            own[number] = _landed(life) if agrees else life
    made = Script(lives, views)
    _unheard(made, agrees=agrees)
    return made


def _landed(life: RecordedLife) -> RecordedLife:
    """Without rounds at the end that were put off, whose work is in nobody's weights."""
    rounds = list(life.rounds)
    while rounds and rounds[-1].outcome == ALONE:
        rounds.pop()
    for line in rounds:
        if line.outcome in (ALONE, LATE):
            raise ValueError(
                f"worker {line.seat} did not land round {line.round} in time: where rounds are put off, or a quorum is "
                "enough, a run is not repeated"
            )
    return RecordedLife(life.start, rounds)


def _unheard(script: Script, *, agrees: bool) -> None:
    """Add the rounds that only others tell of."""
    for own in list(script.lives.values()):
        for line in [line for life in own for line in life.rounds if line.outcome == WHOLE]:
            for seat in line.seats:
                if script.line(seat, line.round) is None:
                    life = next((one for one in script.lives.get(seat, ()) if _ends_before(one, line.round)), None)
                    if life is None:
                        raise ValueError(f"nothing is on record of worker {seat} in round {line.round}")
                    life.rounds.append(replace(line, seat=seat, spare=0, outcome=WHOLE if agrees else _LOST))


def _ends_before(life: RecordedLife, round: int) -> bool:
    done = life.rounds[-1].round if life.rounds else life.start.first - 1
    return done == round - 1
