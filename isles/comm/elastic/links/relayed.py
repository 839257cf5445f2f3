"""How many bytes a lighthouse carries for others, by the kernel's count of its connections.

    relayed = what came in on its port, less what was said to the lighthouse itself

The engine does not tell. What frames and encryption add is in it, so it is a little more than the workers' own count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from isles.comm.tcp import Seen, looks


class RelayCounter:
    """On `port`. own: bytes that were said to the lighthouse itself, so far. To be looked at now and then, for what
    comes on a connection after the last look at it is not counted.
    """

    def __init__(self, port: int, own: Callable[[], int], look: Callable[[], Mapping[int, Seen]] = looks) -> None:
        self._port, self._own, self._look = str(port), own, look
        self._open: dict[str, int] = {}
        self._over = 0

    def relayed(self) -> int:
        """Bytes until now; 0 where the kernel does not count."""
        seen = {look.name: look.received for look in self._look().values() if self._is_ours(look.name)}
        for name, received in self._open.items():
            if seen.get(name, -1) < received:  # it is closed, or another one has its name
                self._over += received
        self._open = seen
        return max(self._over + sum(seen.values()) - self._own(), 0)

    def _is_ours(self, name: str) -> bool:
        return name.partition(" ")[0].rpartition("|")[2] == self._port
