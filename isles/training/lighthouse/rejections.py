"""What the lighthouse and the workers of a run have refused, put together: named once each, counted in the summary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from isles.membership.session import RejectionRow, Rejections, read_rejections

LIGHTHOUSE = -1
_MOST = 100  # lines for a person


class RejectionLog:
    """own: the lighthouse's, as it grows. notice: called with a line for each (by whom, of whom, why) that is new."""

    def __init__(self, own: Rejections, notice: Callable[[str], None]) -> None:
        self._own, self._notice = own, notice
        self._reported: dict[int, list[RejectionRow]] = {}  # by the member that refuses
        self._named: set[tuple[int, int, str]] = set()

    def update(self, by: int, rows: Any) -> None:
        """What worker `by` says that it has refused so far. ValueError where that is no such list."""
        self._reported[by] = read_rejections(rows)
        self._name(by, self._reported[by])

    def look(self) -> None:
        """Name what is new of the lighthouse's."""
        self._name(LIGHTHOUSE, self._own.rows())

    def rows(self) -> list[tuple[int, int, str, int]]:
        """(by whom, of whom, why, how often). -1: the lighthouse; somebody without a member, or in another's name."""
        every = {LIGHTHOUSE: self._own.rows(), **self._reported}
        return [(by, *row) for by, rows in sorted(every.items()) for row in rows]

    def table(self) -> list[dict[str, Any]]:
        """`rows`, for the summary."""
        return [dict(zip(("by", "member", "reason", "times"), row, strict=True)) for row in self.rows()]

    def _name(self, by: int, rows: Iterable[RejectionRow]) -> None:
        for member, why, _ in rows:
            if (by, member, why) in self._named or len(self._named) >= _MOST:
                continue
            self._named.add((by, member, why))
            where = "the lighthouse" if by == LIGHTHOUSE else f"worker {by}"
            whom = "somebody" if member < 0 else f"worker {member}"
            self._notice(f"{where} refuses {whom}: {why}")
