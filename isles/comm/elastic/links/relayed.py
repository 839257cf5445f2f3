"""How many bytes a lighthouse carries for others, by the kernel's count of its connections.

    relayed = what came in on its port, less what was said to the lighthouse itself

The engine does not tell. What frames and encryption add is in it, so it is a little more than the workers' own count.

A connection is looked at through a descriptor of one's own, which keeps the kernel's count of it until all that came is
counted, whoever has closed it meanwhile. The engine's closing reaches the other end at the next look only.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from isles.comm.elastic.lasting.journalled import RELAYED
from isles.comm.tcp import came_to, opened, seen, sockets

WAYS = ("direct", "relayed")
"""How what workers say to each other goes."""
_SPARE = 1 << 20  # bytes


class RelayCounter:
    """On `port`. own: bytes that were said to the lighthouse itself, so far. entries: of the journal so far, for a
    lighthouse that is started again goes on from what it had noted there.

    To be looked at now and then, and when a connection begins: all that comes on one that was looked at once counts.
    Safe to call from several threads.
    """

    def __init__(self, port: int, own: Callable[[], int], entries: Iterable[Mapping[str, Any]] = ()) -> None:
        self._port, self._own = port, own
        self._before = max((entry["bytes"] for entry in entries if entry.get("event") == RELAYED), default=0)
        self._noted = self._before
        self._held: dict[int, socket.socket] = {}  # by the kernel's number
        self._over = 0  # bytes of connections that are closed
        self._relayed = self._before
        self._is_closed = False
        self._looking = threading.Lock()

    def relayed(self) -> int:
        """Bytes until now; 0 where the kernel does not count."""
        with self._looking:
            if not self._is_closed:
                self._look()
            return self._relayed

    def close(self) -> None:
        """Look for the last time, and hold no connection any more. Safe to call twice."""
        self.relayed()
        with self._looking:
            self._is_closed = True
            for end in self._held.values():
                end.close()
            self._held.clear()

    def note(self, relayed: int) -> dict[str, Any] | None:
        """What the journal is to get now that it is so many; None while it grew by less than a hundredth and 1 MB."""
        if relayed <= self._noted + self._noted // 100 + _SPARE:
            return None
        self._noted = relayed
        return {"event": RELAYED, "bytes": relayed}

    def _look(self) -> None:
        own, now = self._own(), sockets()
        open_now = 0
        for number, end in [*self._held.items()]:
            received = _received(end)
            if len(now[number]) > 1:
                open_now += received
            else:  # the engine has closed it, and this is the last descriptor
                self._over += received
                self._held.pop(number).close()
        for number in now.keys() - self._held.keys():
            for end in opened(now[number][0]):
                same = os.fstat(end.fileno()).st_ino == number  # or that descriptor has become another's
                if same and came_to(end, self._port):
                    self._held[number] = end.dup()
                    open_now += _received(end)
        self._relayed = self._before + max(self._over + open_now - own, 0)


def _received(connection: socket.socket) -> int:
    """Bytes that have come on it, whether it is open or not."""
    told = seen(connection)
    return 0 if told is None else told.received
