"""How many bytes a lighthouse carries for others, by the kernel's count of its connections.

    relayed = what came in on its port, less what was said to the lighthouse itself

The engine does not tell. What frames and encryption add is in it, so it is a little more than the workers' own count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from isles.comm.elastic.lasting.journalled import RELAYED
from isles.comm.tcp import Seen, looks

WAYS = ("direct", "relayed")
"""How what workers say to each other goes."""
_SPARE = 1 << 20  # bytes


class RelayCounter:
    """On `port`. own: bytes that were said to the lighthouse itself, so far. To be looked at now and then, for what
    comes on a connection after the last look at it is not counted. entries: of the journal so far, for a lighthouse
    that is started again goes on from what it had noted there.
    """

    def __init__(
        self,
        port: int,
        own: Callable[[], int],
        look: Callable[[], Mapping[int, Seen]] = looks,
        entries: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self._port, self._own, self._look = str(port), own, look
        self._before = max((entry["bytes"] for entry in entries if entry.get("event") == RELAYED), default=0)
        self._noted = self._before
        self._open: dict[str, int] = {}
        self._over = 0

    def relayed(self) -> int:
        """Bytes until now; 0 where the kernel does not count."""
        seen = {look.name: look.received for look in self._look().values() if self._is_ours(look.name)}
        for name, received in self._open.items():
            if seen.get(name, -1) < received:  # it is closed, or another one has its name
                self._over += received
        self._open = seen
        return self._before + max(self._over + sum(seen.values()) - self._own(), 0)

    def note(self, relayed: int) -> dict[str, Any] | None:
        """What the journal is to get now that it is so many; None while it grew by less than a hundredth and 1 MB."""
        if relayed <= self._noted + self._noted // 100 + _SPARE:
            return None
        self._noted = relayed
        return {"event": RELAYED, "bytes": relayed}

    def _is_ours(self, name: str) -> bool:
        return name.partition(" ")[0].rpartition("|")[2] == self._port
