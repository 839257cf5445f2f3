"""A worker's watch over its own training thread: one that hangs says so, and sends no beats until it goes on, so that
the lighthouse counts its member as lost.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from isles.membership.client import MembershipClient

_TIMES = 10  # of the usual step
_LOOK = 1.0  # seconds
_RETAINED = 101  # step times


class StallWatch:
    """Watches the inner steps of a member, from the third one on, until `close`. A wait for others is no stall, nor is
    anything between two steps. least: seconds of a stall at least.
    """

    def __init__(self, client: MembershipClient, least: float, notice: Callable[[str], None]) -> None:
        self._client, self._least, self._notice = client, least, notice
        self._times, self._number, self._begun = deque[float](maxlen=_RETAINED), 0, False
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="isles-stall", daemon=True).start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context for an inner step."""
        began, self._begun = time.monotonic(), True
        yield
        self._begun, self._number = False, self._number + 1
        self._times.append(time.monotonic() - began)

    def close(self) -> None:
        """End the watch."""
        self._over.set()

    def _watch(self) -> None:
        still, seen, looked_at = 0.0, (0, 0.0, 0), time.monotonic()
        while not self._over.wait(_LOOK):
            now, mark = time.monotonic(), (self._number, self._client.waited, self._client.waits_for)
            more = min(now - looked_at, 2 * _LOOK)  # time in which this process was stopped does not count
            before, still = still, still + more if mark == seen and self._begun and len(self._times) > 1 else 0.0
            seen, looked_at = mark, now
            usual = median([*self._times] or [0.0])
            stalls = still > max(_TIMES * usual, self._least)
            if stalls != self._client.stalls:
                line = f"this worker goes on after {before:.0f} s"
                if stalls:
                    line = (
                        f"this worker has done no step for {still:.0f} s (a step usually takes {usual:.2g} s): it is "
                    )
                    line += "left out until it goes on"
                self._client.stalls = stalls
                self._notice(line)
                self._client.report({"notice": line})
