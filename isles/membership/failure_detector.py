"""Which members are connected and responsive.

The session knows who is connected. That is not enough: anybody in the session can be present under a member's name, a
process may hang while its connection stays open, and the session may be slow to give up a connection. So a member that
is connected but sends nothing authenticated for `SILENT` seconds counts as lost until it sends again; workers send a
beat each second.

Before that, a member that others wait for, and that has missed a beat, is suspected: nobody should wait for it, but it
is not lost. A partner may also be late because it is slow, or itself waits for another one; so a worker that waits in
vain asks the lighthouse (`p2p.transport`), which gets each worker's beats.

Only time in which the lighthouse was running counts: while it was suspended itself it could hear nobody. Its workers
may have given up their connections to it meanwhile: those that connect again soon are not lost.
"""

from __future__ import annotations

import math

SILENT = 10.0  # seconds; the session detects broken connections sooner, and a worker on a busy machine beats late
_SUSPECT_AFTER = 1.5  # seconds without a beat; beats are sent each second
_MOST = 4096  # lost members to remember, see `changed`
_LOOK = 0.5  # the longest interval between looks that counts, seconds: in a longer one it was suspended
_STOOD = 2.0  # after a longer one, workers may have given it up
_RETURN = 5.0  # seconds for them to come back


class IslandLiveness:
    """Which members are connected with all workers: an island is lost once one of its workers is."""

    def __init__(self) -> None:
        self._missing: dict[int, set[int]] = {}  # by member with a connected leader: ranks that are not connected

    def changed(self, member: int, island_rank: int, there: bool) -> bool | None:
        """The connection of the worker at `island_rank` opened or broke. Returns whether the member is complete now;
        None if that has not changed. Ranks that have never connected count as on their way.
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
    """Which members are connected and send beats, for a lighthouse that looks several times a second.

    stood: seconds for which it was suspended, since somebody last set this to 0.
    """

    def __init__(self) -> None:
        self._looked_at: float | None = None
        self._now = 0.0  # seconds in which the lighthouse was running
        self._woke = -math.inf  # when it was last suspended for long
        self.stood = 0.0
        self._spoke_at: dict[int, float] = {}  # by connected member: when it last sent something, or connected
        self._returns: dict[int, float] = {}  # by member whose connection broke: until when it may come back
        self._silent: set[int] = set()
        self._suspected: dict[int, float] = {}  # by member: when others were last notified
        self._lost: dict[int, None] = {}  # the newest _MOST

    def changed(self, member: int, there: bool) -> None:
        """A connection opened or broke."""
        self._silent.discard(member)
        self._returns.pop(member, None)
        if there:
            self._spoke_at[member] = self._now
            self._lost.pop(member, None)
        elif member in self._spoke_at:
            del self._spoke_at[member]
            self._lost[member] = None
            if len(self._lost) > _MOST:  # anybody with the token can connect under many names
                del self._lost[next(iter(self._lost))]

    def may_return(self, member: int, at: float) -> bool:
        """The connection of `member` breaks now (`at`: as in `newly_silent`). Returns whether that may be because this
        lighthouse was suspended: then the member counts as lost once it has said nothing for `_RETURN` more.
        """
        self._pass(at)
        if member not in self._spoke_at or self._now - self._woke > _RETURN:
            return False
        self._returns[member] = self._now + _RETURN
        return True

    def silence(self, member: int) -> float:
        """Seconds since a connected member last sent something, to a tenth."""
        return round(self._now - self._spoke_at.get(member, self._now), 1)

    def is_lost(self, member: int) -> bool:
        """Whether a member was connected, and its connection broke."""
        return member in self._lost

    def joined(self, member: int) -> None:
        """A member id was issued; its worker will connect."""
        self._spoke_at[member] = self._now

    def heard_from(self, member: int) -> bool:
        """A member sent something. Returns whether it had counted as silent."""
        if member in self._spoke_at:
            self._spoke_at[member] = self._now
            self._returns.pop(member, None)
        was_silent = member in self._silent
        self._silent.discard(member)
        return was_silent

    def to_notify(self, member: int) -> list[int]:
        """A worker waits in vain for `member`. Returns whom to notify that it is silent; nobody if it has just sent
        something, or if they were notified a moment ago.
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
            if at - self._looked_at > _STOOD:
                self._woke, self.stood = self._now, self.stood + at - self._looked_at
        self._looked_at = at

    def newly_silent(self, at: float) -> list[int]:
        """Look now (seconds of any clock). Returns members that count as lost from now on because of their silence."""
        self._pass(at)
        ends = {member: self._returns.get(member, spoke_at + SILENT) for member, spoke_at in self._spoke_at.items()}
        newly = [member for member, end in ends.items() if self._now > end and member not in self._silent]
        self._silent |= {*newly}
        return newly
