"""What the coordinators take and return: the rules of a run, their effects, and what they know of each worker.

`coordinator.RoundsCoordinator` and `swarm_coordinator.SwarmCoordinator` are state machines that outlive their
lighthouse: a call returns `Effect`s, which the lighthouse carries out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from isles.membership.messages import Load, Message


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of one run.

    founders: workers that the first view waits for. sync_every: inner steps per round. agrees: whether all members land
    the same mean (an all-reduce method), by the lighthouse's decision. most: workers at once. last: the run's last
    round; None for a run without an end, or for one that ends with the round in which `batches` (one per worker and
    inner step) have been read. quorum: share of the members that is enough for the mean of any round but the last; 0:
    all. weights: bytes of the model at the start; 0: not known. waits, evaluates: seconds for which a member may wait
    for another one's part, and for validation.
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
    evaluates: float = 600.0


@dataclass(frozen=True)
class Append:
    """Write this entry to the journal before any later effect leaves the machine."""

    entry: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """Answer the caller."""

    message: Message


@dataclass(frozen=True)
class Notify:
    """Notify `member`. The notification may be lost: replies to later beats repeat its content."""

    member: int
    message: Message


Effect = Append | Reply | Notify


WorkerState = Literal["outside", "ready", "in", "leaving", "left", "banned"]


@dataclass
class Worker:
    """What the lighthouse knows of one member. address: from which it joined, "" for one of its own. call: how often it
    was asked to load another state; entered: its first round with the present one.
    """

    member: int
    identity: str = ""
    address: str = ""
    state: WorkerState = "outside"
    connected: bool = True
    call: int = 0
    entered: int = 0
    round: int = 0
    seconds: float = 0.0
    load: Load | None = None
    tried: set[int] = field(default_factory=set)  # donors whose state did not arrive

    def enter(self, since: int) -> None:
        """Note that a view from round `since` on includes this worker."""
        if self.state != "in":
            self.state, self.entered = "in", since
        self.load, self.tried = None, set()

    def knows(self, round: int) -> bool:
        """Whether it has trained with its present state, and so far that it can judge shares of `round`."""
        return max(self.entered, 1) <= self.round and self.entered <= round <= self.round + 1

    @property
    def here(self) -> bool:
        """Whether it takes part in the run now."""
        return self.connected and self.state not in ("left", "banned")


class Addressed(Protocol):
    """A member with the address from which it joined."""

    address: str

    @property
    def here(self) -> bool:
        """Whether it takes part now."""


Known = TypeVar("Known", bound=Addressed)


class MemberTable(dict[int, Known]):
    """By member, what is known of it. All members behind one address have one vote together, unless all that take part
    are behind that one.
    """

    _is_one: bool | None = None  # whether they are; None: not known

    def voter(self, member: int) -> str | int:
        """Who votes for `member`: its address, or itself if that is unknown or the lighthouse's own."""
        if self._is_one is None:
            self._is_one = len({one.address or key for key, one in self.items() if one.here}) < 2
        return member if self._is_one or member not in self else self[member].address or member

    def votes(self, members: Iterable[int]) -> int:
        """The number of votes of `members`."""
        return len({*map(self.voter, members)})

    def prevails(self, some: Collection[int], members: Collection[int]) -> bool:
        """Whether `some` of `members` outvote the others. Of two equal halves the first member's counts."""
        share, whole = 2 * self.votes(some), self.votes(members)
        return share > whole or (share == whole and bool(members) and min(members) in some)

    def changed(self) -> None:
        """Call after a member joined, or its connection or state changed."""
        self._is_one = None


class WorkerTable(MemberTable[Worker]):
    """All workers of the run so far, by member: in a long run many more than take part now. `here` and `members` are
    cached until `changed` is called, because every message asks for them.
    """

    _here: list[Worker] | None = None
    _members: dict[tuple[WorkerState, ...], tuple[int, ...]] | None = None

    @property
    def here(self) -> list[Worker]:
        """Workers that take part now."""
        if self._here is None:
            self._here = [worker for worker in self.values() if worker.here]
        return self._here

    def members(self, *states: WorkerState) -> tuple[int, ...]:
        """Those of `here` in one of `states`."""
        if self._members is None:
            self._members = {}
        if states not in self._members:
            self._members[states] = tuple(worker.member for worker in self.here if worker.state in states)
        return self._members[states]

    def waiting(self, members: Collection[int]) -> list[Worker]:
        """Workers outside `members` that have not loaded a state yet, connected or not."""
        return [one for one in self.values() if one.state in ("outside", "ready") and one.member not in members]

    def changed(self) -> None:
        """See `MemberTable`; forgets also what is cached."""
        super().changed()
        self._here = self._members = None


RELAYED = "relayed"
"""The journal's entry of the number of bytes relayed so far."""


class Coordinator(ABC):
    """The state machine of a world whose workers come and go. Each call returns the effects to carry out, in order.

    Whatever a restarted lighthouse must know changes in `_apply` alone, by an entry of the journal: the entry goes out
    as an `Append`, and is applied again when the journal is read.

    Args (of the calls): now, seconds of one clock.
    finished: members that have done the last round.
    """

    def __init__(self, entries: Iterable[dict[str, Any]], until: float) -> None:
        """entries: of the journal so far. until: when `_count_absent` takes members that have not reconnected for lost,
        if there are any.
        """
        self._out: list[Effect] = []
        self.finished: set[int] = set()
        for entry in entries:
            self._apply(entry)
        self._awaited = set(self._connected())
        self._until = until if self._awaited else 0.0

    @abstractmethod
    def join(self, now: float, description: str, certificates: Sequence[str] = (), address: str = "") -> list[Effect]:
        """A worker asks for a member id. certificates: as in `Hello`. address: whose one vote it shares; "": none."""

    @abstractmethod
    def disconnected(self, now: float, member: int) -> list[Effect]:
        """The connection of a member broke: it is dead, frozen or cut off."""

    @abstractmethod
    def reconnected(self, now: float, member: int) -> list[Effect]:
        """The connection of a member is there (again)."""

    @abstractmethod
    def tick(self, now: float) -> list[Effect]:
        """Time passes. After a restart, members that have not reconnected by `until` are lost."""

    @abstractmethod
    def hear(self, now: float, member: int, message: Any) -> list[Effect] | None:
        """Handle a worker's message; None for a kind that no worker sends. ValueError for impossible values."""

    @abstractmethod
    def about(self) -> tuple[int, int, int]:
        """(workers that train, the newest round or step, the last one or 0)."""

    @abstractmethod
    def _apply(self, entry: dict[str, Any]) -> None:
        """The only place where anything changes that a restarted lighthouse must know."""

    @abstractmethod
    def _connected(self) -> Iterable[int]:
        """Members that take part and were last known to be connected."""

    def _record(self, event: str, **values: Any) -> None:
        entry = {"event": event, **values}
        self._out.append(Append(entry))
        self._apply(entry)

    def _reply(self, message: Message) -> None:
        self._out.append(Reply(message))

    def _taken(self) -> list[Effect]:
        """Take the effects since the last call."""
        effects, self._out = self._out, []
        return effects

    def postpone(self, seconds: float) -> None:
        """The lighthouse was suspended for so long: members could not reconnect meanwhile."""
        self._until += seconds

    def _count_absent(self, now: float) -> None:
        """After a restart, count members that have not reconnected in time as lost."""
        if self._awaited and now >= self._until:
            for member in sorted(self._awaited):
                self._record("lost", member=member)
            self._awaited = set()


def of_another_version(entry: dict[str, Any]) -> None:
    """ValueError for an unknown entry. Some entries are only for readers: a restart of the lighthouse, the end of the
    run, and the number of relayed bytes.
    """
    if entry.get("event") not in ("restart", "end", RELAYED):
        raise ValueError(f"the journal holds an event that this version does not know: {str(entry)[:80]}")
