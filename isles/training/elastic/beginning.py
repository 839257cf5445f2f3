"""With whose state a worker begins, and with which round: the part of `joining` before the first round.

told whose state to begin with       take it, or as drawn where nobody has one; say that it is here
wait for the first round             the others go on meanwhile
pairs and groups                     take a newer state where that one is old by then
all land one mean                    land those of the rounds in between, as the donor did
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from isles.comm.elastic.company import Company
from isles.comm.elastic.gifts.taking import NotAdopted, NotGiven, NotOffered
from isles.comm.elastic.messages import Load
from isles.comm.elastic.record import StartLine, as_line
from isles.comm.elastic.rounds.decision import Decision
from isles.comm.errors import RendezvousFailed
from isles.comm.transport import Transport
from isles.training.elastic.states import FRESH, States
from isles.training.elastic.worker import Decisions

SLOW = 60.0
"""Seconds without a piece of a state, beyond two rounds of its donor, until another one is asked for."""
_TRIES = 3  # to have the state that the lighthouse keeps
_MOMENT = 0.25  # seconds for a state to come once it is copied
_WAIT = 5.0  # seconds between looks at whether the run has ended
_AHEAD = 2  # rounds before its first one in which a worker of pairs and groups asks for a newer state


@dataclass
class Beginning:
    """states: what was taken. leaving: set once this worker is to leave. agrees: whether all land one mean."""

    company: Company
    transport: Transport
    states: States
    leaving: threading.Event
    notice: Callable[[str], None]
    agrees: bool
    _has: int = 0  # the round of the state that was taken last
    _tries: int = 0  # to have the one that the lighthouse keeps, in succession

    def with_state(self, load: Load) -> Decisions[int | None]:
        """Take the state that the lighthouse names. The first round with it; None where there is none now."""
        if not (yield from self._take(load)):
            return None
        round = yield from self._first(ahead=0 if self.agrees else _AHEAD)
        if round is not None and not self.agrees:
            round = (yield from self._first()) if (yield from self._freshens(load, round)) else None
        if round is None or not (yield from self._catches_up(load, round)):
            return None
        round = max(self.company.first(0.0) or round, self._has + 1)  # in step with the donor, not a round behind
        self._tell_start(load, round)
        return round

    def _take(self, load: Load) -> Decisions[bool]:
        """Begin with the state that the lighthouse names; False where it did not come."""
        try:
            patience = SLOW + 2 * load.seconds
            self._has, left_out = yield Decision(kind="load", donor=load.donor, seconds=patience)
        except NotGiven as why:
            if load.donor >= 0 or not isinstance(why, NotOffered):
                self._ask_again(load.donor, why)
                return False
            yield Decision(kind="draw")
            self._has, left_out = 0, {}
        self._tries = 0
        self.company.loaded(load, self._has, left_out)
        return True

    def _ask_again(self, donor: int, why: NotGiven) -> None:
        """For another state. To begin anew where the lighthouse keeps one would throw away what the run has learned:
        RendezvousFailed where that one does not come.
        """
        self._tries += donor < 0
        if self._tries == _TRIES:
            raise RendezvousFailed(
                f"the state that the lighthouse keeps could not be begun with ({why}): join again, and where that "
                "does not help look at RUN/states there"
            )
        whose = "that the lighthouse keeps" if donor < 0 else f"of worker {donor}"
        self.notice(f"the state {whose} did not come ({why}): asking again")
        self.company.reload()

    def _first(self, ahead: int = 0) -> Decisions[int | None]:
        """The first round of this worker, once others are in it, or `ahead` rounds before it. None: it has none now."""
        round, company = None, self.company
        while round is None and not company.is_called and company.ended is None and not self.leaving.is_set():
            yield Decision(kind="idle")
            round = company.first(_WAIT, ahead)
        return round

    def _freshens(self, load: Load, round: int) -> Decisions[bool]:
        """The others went on while this worker waited for its first round: an old state would draw them back, so it
        takes the one that the donor has at the end of the round before. Not for long: in that first round others wait
        for this worker, and perhaps the donor does, who gives nothing meanwhile. False where it has no state any more.
        """
        if load.donor < 0 or round - self._has <= FRESH:
            return True
        slow, wait = SLOW + 2 * load.seconds, 3 * load.seconds + _MOMENT
        try:
            self._has, _ = yield Decision(kind="load", donor=load.donor, seconds=slow, round=round - 2, wait=wait)
        except NotAdopted as why:
            self.notice(f"a newer state of worker {load.donor} is none ({why}): another state is asked for")
            self.company.reload()
            return False
        except NotGiven as why:
            self.notice(f"a newer state of worker {load.donor} did not come ({why}): on with that of before")
        return True

    def _catches_up(self, load: Load, round: int) -> Decisions[bool]:
        """Where all land one mean this worker lands those of the rounds before its first, or is of no use."""
        if load.donor < 0 or not self.agrees:
            return True
        donor, patience = load.donor, SLOW + 2 * load.seconds
        try:
            left_out = yield Decision(kind="catch up", donor=donor, round=self._has + 1, until=round, seconds=patience)
        except NotGiven as why:
            self.notice(f"worker {donor}'s landings did not come ({why}): another state is asked for")
            self.company.reload()
            return False
        self.company.leaves_out(left_out)
        self._has = round - 1
        return True

    def _tell_start(self, load: Load, round: int) -> None:
        line = StartLine(
            seat=self.company.seat,
            first=round,
            donor=load.donor if self._has else -1,
            copied=self.states.of,
            has=self._has,
            size=self.states.taken,
            at=self.transport.now(),
        )
        self.company.report({"start": as_line(line)})
