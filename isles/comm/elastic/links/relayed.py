"""How many bytes a lighthouse carries for others: what its clients say to each other, counted by its session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from isles.comm.elastic.lasting.journalled import RELAYED

_SPARE = 1 << 20  # bytes


class RelayCount:
    """carried: bytes since this session began. entries: of the journal so far, for a lighthouse that is started again
    goes on from what it had noted there.
    """

    def __init__(self, carried: Callable[[], int], entries: Iterable[Mapping[str, Any]] = ()) -> None:
        self._carried = carried
        self._before = max((entry["bytes"] for entry in entries if entry.get("event") == RELAYED), default=0)
        self._noted = self._before

    def relayed(self) -> int:
        """Bytes until now."""
        return self._before + self._carried()

    def note(self, relayed: int) -> dict[str, Any] | None:
        """What the journal is to get now that it is so many; None while it grew by less than a hundredth and 1 MB."""
        if relayed <= self._noted + self._noted // 100 + _SPARE:
            return None
        self._noted = relayed
        return {"event": RELAYED, "bytes": relayed}
