"""Whose connection is there, and speaks.

The engine tells who is connected; but anybody in the session can be there under a seat's name, and a process may stand
while its connection answers. So who is there, and says nothing that bears the seat's key for `SILENT` seconds, is gone
until it speaks again: a worker beats each second.
"""

from __future__ import annotations

SILENT = 30.0  # seconds


class Presence:
    """As the lighthouse sees it. Moments are seconds of one clock."""

    def __init__(self) -> None:
        self._heard: dict[int, float] = {}  # of those that are there: when they spoke last, or came
        self._mute: set[int] = set()

    def changed(self, seat: int, there: bool, now: float) -> None:
        """A connection came or broke."""
        self._mute.discard(seat)
        if there:
            self._heard[seat] = now
        else:
            self._heard.pop(seat, None)

    def joined(self, seat: int, now: float) -> None:
        """A seat was given to somebody, who is to come."""
        self._heard[seat] = now

    def spoke(self, seat: int, now: float) -> bool:
        """A word of the seat's own; whether it was taken for gone, and is back."""
        if seat in self._heard:
            self._heard[seat] = now
        was_mute = seat in self._mute
        self._mute.discard(seat)
        return was_mute

    def silent(self, now: float) -> list[int]:
        """Who is gone now, for it has said nothing; each is named once."""
        found = [seat for seat, heard in self._heard.items() if now - heard > SILENT and seat not in self._mute]
        self._mute |= {*found}
        return found
