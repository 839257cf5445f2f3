"""What the coordinators take and return: the rules of a run, their effects, and what they know of each worker.

`coordinator.RoundsCoordinator` and `swarm_coordinator.SwarmCoordinator` are state machines that outlive their
lighthouse: a call returns `Effect`s, which the lighthouse carries out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from isles.membership.messages import Admitted, Load, Message, Refusal, RunStatus, identity_of


@dataclass(frozen=True, kw_only=True)
class MemberLimits:
    """most: workers at once. members: that a run may have, over all time."""

    most: int = 1024
    members: int = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Rules(MemberLimits):
    """The rules of one run.

    founders: workers that the first view waits for. sync_every: inner steps per round. agrees: whether all members land
    the same mean (an all-reduce method), by the lighthouse's decision. last: the run's last
    round; None for a run without an end, or for one that ends with the round in which `batches` (one per worker and
    inner step) have been read. quorum: share of the members that is enough for the mean of any round but the last; 0:
    all. weights: bytes of the model at the start; 0: not known. waits, evaluates: seconds for which a member may wait
    for another one's part, and for validation.
    """

    founders: int
    sync_every: int
    agrees: bool = False
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
class Known:
    """What the lighthouse knows of one member. identity: see `View.identities`. address: from which it joined, "" for
    one of the lighthouse's own machine.
    """

    member: int
    identity: str = ""
    address: str = ""
    connected: bool = True

    @property
    def here(self) -> bool:
        """Whether it takes part in the run now."""
        return self.connected


@dataclass
class Worker(Known):
    """A worker of whole replicas. call: how often it was asked to load another state; why: the reason of the last call,
    or of its ban; entered: its first round with the present one.
    """

    state: WorkerState = "outside"
    call: int = 0
    why: str = ""
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
        return self.connected and self.state not in ("left", "banned")


KnownMember = TypeVar("KnownMember", bound=Known)


class MemberTable(dict[int, KnownMember]):
    """By member, what is known of it. All members behind one address have one vote together, unless all that take part
    are behind that one.
    """

    _is_one: bool | None = None  # whether they are; None: not known

    @property
    def here(self) -> list[KnownMember]:
        """Those that take part now."""
        return [one for one in self.values() if one.here]

    def voter(self, member: int) -> str | int:
        """Who votes for `member`: its address, or itself if that is unknown or the lighthouse's own."""
        if self._is_one is None:
            self._is_one = len({one.address or one.member for one in self.here}) < 2
        return member if self._is_one or member not in self else self[member].address or member

    def votes(self, members: Iterable[int]) -> int:
        """The number of votes of `members`."""
        return len({*map(self.voter, members)})

    def outvote(self, some: Collection[int], members: Collection[int]) -> bool:
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
        if self._here is None:
            self._here = super().here
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
        super().changed()
        self._here = self._members = None


RELAYED = "relayed"
"""The journal's entry of the number of bytes relayed so far."""


_BANS = 3  # members of one address that were shut out, after which it may send no more


class Coordinator(ABC):
    """The state machine of a world whose workers come and go. Each call returns the effects to carry out, in order.

    Whatever a restarted lighthouse must know changes in `_apply` alone, by an entry of the journal: the entry goes out
    as an `Append`, and is applied again when the journal is read.

    Args (of the calls): now, seconds of one clock.
    finished: members that have done the last round.
    """

    kind: ClassVar[type[Known]]
    """What is known of a member."""

    def __init__(
        self, table: MemberTable[Any], limits: MemberLimits, entries: Iterable[dict[str, Any]], until: float
    ) -> None:
        """table: of all members. entries: of the journal so far. until: when `_count_absent` takes members that have
        not reconnected for lost, if there are any.
        """
        self._table, self._limits, self._out = table, limits, list[Effect]()
        self._bans = Counter[str]()  # by address
        self.finished: set[int] = set()
        for entry in entries:
            self._apply(entry)
        self._awaited = {one.member for one in table.here}
        self._until = until if self._awaited else 0.0

    def join(self, now: float, description: str, certificates: Sequence[str] = (), address: str = "") -> list[Effect]:
        """A worker asks for a member id. certificates: as in `Hello`. address: whose one vote it shares; "": none."""
        member, limits, why = len(self._table), self._limits, ""
        if self._bans[address] >= _BANS:
            why = f"{_BANS} members from this address were shut out of the run"
        elif len(self._table.here) >= limits.most:
            why = f"the run has its most workers, {limits.most} (isles lighthouse --max-members)"
        elif member >= limits.members:
            why = f"the run has issued its {limits.members} member ids, and none is used twice"
        if why:
            return [Reply(Refusal(why))]
        self._record("join", member=member, description=description, certificates=[*certificates], address=address)
        self._reply(Admitted(member))
        return self._effects(now)

    def disconnected(self, now: float, member: int) -> list[Effect]:
        """The connection of a member broke: it is dead, frozen or cut off."""
        if member in self._table and self._table[member].connected:
            self._record("lost", member=member)
        return self._effects(now)

    def reconnected(self, now: float, member: int) -> list[Effect]:
        """The connection of a member is there (again)."""
        self._awaited.discard(member)
        if member in self._table and not self._table[member].connected:
            self._record("back", member=member)
        return self._effects(now)

    def tick(self, now: float) -> list[Effect]:
        """Time passes. After a restart, members that have not reconnected by `until` are lost."""
        self._count_absent(now)
        return self._effects(now)

    @abstractmethod
    def hear(self, now: float, member: int, message: Any) -> list[Effect] | None:
        """Handle a worker's message; None for a kind that no worker sends. ValueError for impossible values."""

    @abstractmethod
    def alive(self) -> Sequence[int]:
        """Members that train now."""

    @abstractmethod
    def about(self) -> tuple[int, int, int]:
        """(workers that train, the newest round or step, the last one or 0)."""

    @abstractmethod
    def now(self, now: float, refused: Sequence[tuple[int, int, str, int]]) -> RunStatus:
        """The run's status, for the user. refused: see `RunStatus`."""

    @abstractmethod
    def _step(self, now: float) -> None:
        """Do everything that is due now."""

    @abstractmethod
    def _change(self, entry: dict[str, Any]) -> bool:
        """What `entry` changes in this kind of run; False if it knows no such event."""

    def _apply(self, entry: dict[str, Any]) -> None:
        """The only place where anything changes that a restarted lighthouse must know. ValueError for an unknown entry.
        Some entries are only for readers: a restart of the lighthouse, the end of the run, the bytes relayed so far.
        """
        event = entry.get("event")
        if event == "join":
            member = entry["member"]
            self._table[member] = self.kind(member, identity_of(entry["certificates"]), entry.get("address", ""))
        elif not self._change(entry) and event not in ("restart", "end", RELAYED):
            raise ValueError(f"the journal holds an event that this version does not know: {str(entry)[:80]}")
        if event == "ban" and (address := self._table[entry["member"]].address):
            self._bans[address] += 1
        if event != "beat":  # which changes no table, and is most of the journal
            self._table.changed()

    def _record(self, event: str, **values: Any) -> None:
        entry = {"event": event, **values}
        self._out.append(Append(entry))
        self._apply(entry)

    def _reply(self, message: Message) -> None:
        self._out.append(Reply(message))

    def _effects(self, now: float) -> list[Effect]:
        """Do everything that is due, and take the effects since the last call."""
        self._step(now)
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
