"""What a worker tells of its run: lines that the lighthouse takes in their order, kept while it is away."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from isles.comm.elastic.control import ControlSession

_KEPT = 4096  # lines, while nobody takes them
_AGAIN = 0.2  # seconds
_ENDING = 5.0


class Reports:
    """take: hands one over, and calls back with whether it was taken; one at a time."""

    def __init__(self, session: ControlSession, take: Callable[[bytes, Callable[[bool], None]], None]) -> None:
        self._session, self._take = session, take
        self._lines: deque[bytes] = deque(maxlen=_KEPT)
        self._changed = session.condition()
        self._is_busy = self._closed = False

    def add(self, event: Mapping[str, Any]) -> None:
        """Queue one more event, JSON-able."""
        with self._changed:
            self._lines.append(json.dumps(event).encode("utf-8"))
            if not self._is_busy:
                self._hand_over()

    def settle(self, seconds: float) -> None:
        """Wait until all have been taken, `seconds` at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines, seconds)

    def close(self) -> None:
        """What nobody takes at once is lost. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._is_busy, _ENDING)

    def _hand_over(self) -> None:
        with self._changed:
            self._is_busy = True
            self._take(self._lines[0], partial(self._taken, self._lines[0]))

    def _taken(self, line: bytes, taken: bool) -> None:
        with self._changed:
            if taken and self._lines[0] is line:  # else newer ones have taken its place meanwhile
                self._lines.popleft()
            self._is_busy = bool(self._lines) and (taken or not self._closed)
            if self._is_busy:
                self._session.later(self._hand_over, 0.0 if taken else _AGAIN)
            self._changed.notify_all()
