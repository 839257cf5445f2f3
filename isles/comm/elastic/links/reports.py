"""What a worker tells of its run: lines that the lighthouse takes in their order, kept while it is away."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

_KEPT = 4096  # lines, while nobody takes them
_AGAIN = 0.2  # seconds
_ENDING = 5.0


class Reports:
    """take: hands one over, and says whether it was taken; it may wait, and has a thread of its own."""

    def __init__(self, take: Callable[[bytes], bool]) -> None:
        self._take = take
        self._lines: deque[bytes] = deque(maxlen=_KEPT)
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="isles-reports", daemon=True)
        self._thread.start()

    def add(self, event: Mapping[str, Any]) -> None:
        """Queue one more event, JSON-able."""
        with self._changed:
            self._lines.append(json.dumps(event).encode("utf-8"))
            self._changed.notify_all()

    def settle(self, seconds: float) -> None:
        """Wait until all have been taken, `seconds` at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines, seconds)

    def close(self) -> None:
        """What nobody takes at once is lost. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_ENDING)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closed)
                if not self._lines:
                    return
                line = self._lines[0]
            taken = self._take(line)
            with self._changed:
                if taken and self._lines and self._lines[0] is line:
                    self._lines.popleft()
                    self._changed.notify_all()
                elif self._closed:
                    return
            if not taken:
                time.sleep(_AGAIN)
