"""Which members are connected and responsive.

The session knows who is connected; but anybody in the session can be present under a member's name, a process may stand
while its connection answers, and the session may take its time to give up a connection. So a member that is present,
and says nothing that bears its key for `SILENT` seconds, counts as lost until it speaks again: a worker beats each
second.

Sooner than that, a member that is waited for in vain and has not spoken for longer than a beat takes is suspected:
nobody is to wait for it, but it is not lost. A partner may also be late because it is slow, or waits for another one
itself; so a worker that waits in vain asks the lighthouse (`p2p.transport`), which hears each worker every second.

Seconds are those in which the lighthouse looked: while it was held up itself nobody could be heard.
"""

from __future__ import annotations

SILENT = 10.0  # seconds; the engine tells sooner, and a worker whose machine is busy beats late
_SUSPECT_AFTER = 1.5  # seconds without a beat, which comes each second
_MOST = 4096  # members that are gone and remembered
_LOOK = 0.5  # seconds from one look to the next that count, at most


class IslandLiveness:
    """Which members are there as a whole: an island is several workers, and is gone once one of them is."""

    def __init__(self) -> None:
        self._missing: dict[int, set[int]] = {}  # by member whose first worker is there: places whose connection broke

    def changed(self, member: int, island_rank: int, there: bool) -> bool | None:
        """The connection of the worker at `island_rank` came or broke: whether the member is there now; None where that
        is as before. Who has not come yet is on its way.
        """
        if island_rank == 0:
            self._missing.pop(member, None)
            if there:
                self._missing[member] = set()
            return there
        missing = self._missing.get(member)
        if missing is None:
            return None
        was_whole = not missing
        (missing.discard if there else missing.add)(island_rank)
        return None if was_whole == (not missing) else not missing


class FailureDetector:
    """Who is there and speaks, for a lighthouse that looks several times a second."""

    def __init__(self) -> None:
        self._looked_at: float | None = None
        self._now = 0.0  # seconds in which it looked
        self._spoke_at: dict[int, float] = {}  # of those that are there: when they spoke last, or came
        self._silent: set[int] = set()
        self._suspected: dict[int, float] = {}  # when others were told last
        self._lost: dict[int, None] = {}  # the newest _MOST

    def changed(self, member: int, there: bool) -> None:
        """A connection came or broke."""
        self._silent.discard(member)
        if there:
            self._spoke_at[member] = self._now
            self._lost.pop(member, None)
        elif member in self._spoke_at:
            del self._spoke_at[member]
            self._lost[member] = None
            if len(self._lost) > _MOST:  # anybody with the token can be there, and go, under many names
                del self._lost[next(iter(self._lost))]

    def is_lost(self, member: int) -> bool:
        """Whether it was there, and its connection broke."""
        return member in self._lost

    def joined(self, member: int) -> None:
        """A member was given to somebody, who is to come."""
        self._spoke_at[member] = self._now

    def heard_from(self, member: int) -> bool:
        """A word of the member's own; whether it was taken for gone, and is back."""
        if member in self._spoke_at:
            self._spoke_at[member] = self._now
        was_mute = member in self._silent
        self._silent.discard(member)
        return was_mute

    def to_notify(self, member: int) -> list[int]:
        """Somebody waits in vain for `member`: who is to be told that it is quiet; nobody where it has just spoken, or
        they were told a moment ago.
        """
        spoke_at, suspected_at = self._spoke_at.get(member), self._suspected.get(member, -_SUSPECT_AFTER)
        if spoke_at is None or self._now - spoke_at < _SUSPECT_AFTER or self._now - suspected_at < _SUSPECT_AFTER:
            return []
        self._suspected = {s: at for s, at in self._suspected.items() if self._now - at < _SUSPECT_AFTER} | {
            member: self._now
        }
        return [other for other in self._spoke_at if other != member]

    def _pass(self, at: float) -> None:
        if self._looked_at is not None:
            self._now += min(at - self._looked_at, _LOOK)
        self._looked_at = at

    def newly_silent(self, at: float) -> list[int]:
        """Look, at a moment of any clock. Who is gone now, for it has said nothing; each is named once."""
        self._pass(at)
        found = [s for s, spoke_at in self._spoke_at.items() if self._now - spoke_at > SILENT and s not in self._silent]
        self._silent |= {*found}
        return found
