"""What `membership` takes and returns: the rules of a run, its orders, and what it knows of each worker.

A state machine that outlives its lighthouse: `membership` and `swarm.muster` are two.

Every call returns the orders that go out, in their order. Whatever a lighthouse must know that is started again is
changed by entries of its journal alone, in `_apply`: an entry goes out as a `Record`, and is applied as it will be
when the journal is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from isles.membership.messages import Load, Message


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of one run.

    founders: workers that the first view waits for. sync_every: inner steps a round. agrees: whether all members land
    the same mean (an all-reduce method), on the lighthouse's word. most: workers at once. last: the run's last round;
    None for a run without an end, or for one that ends with the round in which `batches` (one a worker and inner step)
    have been read. quorum: share of the members that is enough for the mean of any round but the last; 0: all of them.
    weights: bytes of the model that the run begins with; 0: not known. waits, judges: seconds for which a member may
    wait for another one's part, and for validation.
    """

    founders: int
    sync_every: int
    agrees: bool = False
    most: int = 1024
    last: int | None = None
    batches: int | None = None
    quorum: float = 0.0
    weights: int = 0
    waits: float = 60.0
    judges: float = 600.0


@dataclass(frozen=True)
class Record:
    """Write this entry to the journal before any later order leaves."""

    entry: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """Answer whoever called."""

    message: Message


@dataclass(frozen=True)
class Tell:
    """Send to `seat`; it may be lost, for the next answers say it again."""

    seat: int
    message: Message


Order = Record | Reply | Tell


class Assembly(Protocol):
    """The state machine of a world whose workers come and go; each call returns the orders that go out. now: seconds of
    one clock. finished: seats that have done the last round.
    """

    finished: set[int]

    def join(self, now: float, description: str, certificates: Sequence[str]) -> list[Order]:
        """A worker asks for a seat. certificates: as in `Hello`."""

    def gone(self, now: float, seat: int) -> list[Order]:
        """The connection of a worker broke."""

    def back(self, now: float, seat: int) -> list[Order]:
        """The connection of a worker is there (again)."""

    def tick(self, now: float) -> list[Order]:
        """Time passes."""

    def hear(self, now: float, seat: int, message: Any) -> list[Order] | None:
        """What a worker says; None where no worker says that. ValueError for what cannot be."""

    def about(self) -> tuple[int, int, int]:
        """(workers that train, the newest round or step, the last one or 0)."""


WorkerState = Literal["outside", "ready", "in", "leaving", "left", "shut"]


@dataclass
class Worker:
    """What the lighthouse knows of one seat. call: how often it was asked to begin with another's state; entered: the
    first round with the one that it has.
    """

    seat: int
    description: str
    identity: str = ""
    state: WorkerState = "outside"
    connected: bool = True
    call: int = 0
    entered: int = 0
    round: int = 0
    seconds: float = 0.0
    load: Load | None = None
    tried: set[int] = field(default_factory=set)  # donors whose state did not come

    def enter(self, since: int) -> None:
        """A view that begins with round `since` includes this worker."""
        if self.state != "in":
            self.state, self.entered = "in", since
        self.load, self.tried = None, set()

    def knows(self, round: int) -> bool:
        """Whether it has trained with the state that it has, and so far that it can speak of `round`."""
        return max(self.entered, 1) <= self.round and self.entered <= round <= self.round + 1

    @property
    def here(self) -> bool:
        """Whether it has a part in the run now."""
        return self.connected and self.state not in ("left", "shut")


class SeatTable(dict[int, Worker]):
    """All workers that there ever were, by seat: after a day many more than are in the run. What it says of those who
    have a part in the run is as of the last `changed`, for it is asked at every word of everybody.
    """

    _here: list[Worker] | None = None
    _seats: dict[tuple[WorkerState, ...], tuple[int, ...]] | None = None

    @property
    def here(self) -> list[Worker]:
        """Those that have a part in the run now."""
        if self._here is None:
            self._here = [worker for worker in self.values() if worker.here]
        return self._here

    def seats(self, *states: WorkerState) -> tuple[int, ...]:
        """Those of `here` in one of `states`."""
        if self._seats is None:
            self._seats = {}
        if states not in self._seats:
            self._seats[states] = tuple(worker.seat for worker in self.here if worker.state in states)
        return self._seats[states]

    def waiting(self, seats: Collection[int]) -> list[Worker]:
        """Workers outside `seats` that have still to begin with a state, connected or not."""
        return [one for one in self.values() if one.state in ("outside", "ready") and one.seat not in seats]

    def changed(self) -> None:
        """Somebody came, or the connection or the state of somebody is another one."""
        self._here = self._seats = None


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
