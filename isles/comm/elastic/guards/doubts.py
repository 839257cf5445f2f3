"""Whether one that is waited for in vain is there at all.

A partner may be late because it is slow, or waits for another one itself, or stands still; the engine tells of the last
only after its lease. So whoever stands still for somebody asks the lighthouse, which hears each worker every second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from typing_extensions import override

from isles.comm.gloo.life import Life
from isles.comm.transport import DOUBT_AFTER, DOUBT_EVERY


class Doubts(Life):
    """ask: called with a seat that is waited for in vain, in the thread that waits."""

    def __init__(self, ask: Callable[[int], None]) -> None:
        super().__init__()
        self._ask = ask
        self._asked: dict[int, float] = {}

    @override
    def awaited(self, peers: Collection[int | None], seconds: float) -> None:
        if seconds < DOUBT_AFTER:
            return
        now = time.monotonic()
        self._asked = {seat: at for seat, at in self._asked.items() if now - at < DOUBT_EVERY}
        for seat in peers:
            if seat is not None and seat not in self._asked:
                self._asked[seat] = now
                self._ask(seat)
