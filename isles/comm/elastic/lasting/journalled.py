"""A state machine that outlives its lighthouse: `membership` and `swarm.muster` are two.

Every call returns the orders that go out, in their order. Whatever a lighthouse must know that is started again is
changed by entries of its journal alone, in `_apply`: an entry goes out as a `Record`, and is applied as it will be
when the journal is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from isles.comm.elastic.messages import Message
from isles.comm.elastic.orders import Order, Record, Reply

RELAYED = "relayed"
"""The journal's entry of how many bytes were carried for others so far."""


class Journalled(ABC):
    """entries: of the journal so far. until: if there is one, `_count_absent` counts who has not come back by then as
    gone.
    """

    def __init__(self, entries: Iterable[dict[str, Any]], until: float) -> None:
        self._out: list[Order] = []
        self.finished: set[int] = set()
        for entry in entries:
            self._apply(entry)
        self._awaited = set(self._connected())
        self._until = until if self._awaited else 0.0

    @abstractmethod
    def _apply(self, entry: dict[str, Any]) -> None:
        """The only place where anything changes that a restarted lighthouse must know."""

    @abstractmethod
    def _connected(self) -> Iterable[int]:
        """Seats whose workers have a part in the run and, as far as is known, a connection."""

    def _record(self, event: str, **values: Any) -> None:
        entry = {"event": event, **values}
        self._out.append(Record(entry))
        self._apply(entry)

    def _reply(self, message: Message) -> None:
        self._out.append(Reply(message))

    def _taken(self) -> list[Order]:
        """The orders since the last time."""
        orders, self._out = self._out, []
        return orders

    def _count_absent(self, now: float) -> None:
        """After a restart, who has not come back in time is gone."""
        if self._awaited and now >= self._until:
            for seat in sorted(self._awaited):
                self._record("gone", seat=seat)
            self._awaited = set()


def of_another_version(entry: dict[str, Any]) -> None:
    """ValueError for an entry that nobody here knows. Some are for readers: that the lighthouse was started again, and
    how much it had carried.
    """
    if entry.get("event") not in ("lit", RELAYED):
        raise ValueError(f"the journal holds an event that this version does not know: {str(entry)[:80]}")
