"""What an elastic run records beside its views, for its report, Goodput and replay. Pure functions.

RUN/members.jsonl      the coordinator's entries, each with its moment `at`
RUN/exchanges.jsonl    a `RoundRecord` for each round of each worker, a `StartRecord` for each state that one began
with
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from isles.base.parsing import MANY, Exact, read

JOURNAL, EXCHANGES = "members.jsonl", "exchanges.jsonl"
WHOLE, LATE, ALONE = "whole", "late", "alone"
_Number = Annotated[int, Field(strict=True, ge=-1, le=1 << 40)]
_Seconds = Annotated[float, Field(strict=True, ge=0, le=1 << 40)]


@dataclass(frozen=True, kw_only=True)
class RoundRecord(Exact):
    """A round of worker `member` that is over.

    view: whose data slice it read, -1: unassigned data; spare: batches of unassigned data that it had read before.
    steps: inner steps, which took `seconds` of computing. members: of its exchange; outcome: `WHOLE`, `ALONE` (no
    partner), or the name of the error that ended it; with a quorum `LATE`: its work is in the next mean. at: its end,
    in seconds of that worker's clock.
    """

    member: _Number
    round: _Number
    view: _Number
    spare: _Number
    steps: _Number
    seconds: _Seconds
    members: Annotated[tuple[_Number, ...], MANY]
    outcome: Annotated[str, Field(strict=True, max_length=40, pattern=r"^[A-Za-z_]\w*$")]
    at: _Seconds


@dataclass(frozen=True, kw_only=True)
class StartRecord(Exact):
    """Worker `member` began before round `first` with the state that `donor` (-1: nobody) had after round `copied`, and
    with the means that landed there up to round `has`. size: bytes of the transferred state.
    """

    member: _Number
    first: _Number
    donor: _Number
    copied: _Number
    has: _Number
    size: _Number
    at: _Seconds


def read_record(value: Any) -> RoundRecord | StartRecord:
    """The record of a line of JSON. ValueError for an invalid one."""
    return read(RoundRecord if isinstance(value, dict) and "outcome" in value else StartRecord, value)


class Restarts:
    """Finds, in the records of a run in their order, when it began again with the state of no member. begun: by the
    first round, the rounds that had been reached, and that of the state.
    """

    def __init__(self, records: Iterable[RoundRecord | StartRecord] = ()) -> None:
        self.newest, self.begun = 0, dict[int, tuple[int, int]]()
        for record in records:
            self.add(record)

    def add(self, record: RoundRecord | StartRecord) -> bool:
        """Take the next record; returns whether the run began again with it."""
        if isinstance(record, RoundRecord):
            self.newest = max(self.newest, record.round)
        elif record.donor < 0 and self.newest and record.first > self.newest and record.first not in self.begun:
            self.begun[record.first] = self.newest, record.has
            return True
        return False

    @property
    def lost(self) -> int:
        """Rounds whose work was lost."""
        return sum(reached - has for reached, has in self.begun.values())


@dataclass(frozen=True, kw_only=True)
class RunHistory:
    """The contents of `members.jsonl`. present: by member, intervals (from, until) in seconds of its connection. views:
    (moment, number, first round, members); of a swarm (moment, epoch, step, members). counts: of entries by event;
    "retry": decisions to repeat a round. outages: of the lighthouse, (last entry, restart). machines: names by member.
    marks: (moment, event, member, or -1) of joins, losses, bans, leaves, restarts, and of swarms that began again, with
    the steps (reached, begun from) in `again`.
    """

    present: Mapping[int, list[tuple[float, float]]]
    views: list[tuple[float, int, int, tuple[int, ...]]]
    counts: Counter[str]
    end: float
    outages: list[tuple[float, float]] = field(default_factory=list)
    machines: dict[int, str] = field(default_factory=dict)
    marks: list[tuple[float, str, int]] = field(default_factory=list)
    again: list[tuple[int, int]] = field(default_factory=list)

    def name(self, member: int) -> str:
        """A member and its machine, as a reader knows it."""
        return f"member {member}" + (f" ({self.machines[member]})" if self.machines.get(member) else "")


def read_history(entries: Iterable[Mapping[str, Any]], end: float = 0.0) -> RunHistory:
    """end: of the run, in seconds of the entries' `at`; at least that of the last entry."""
    present: dict[int, list[tuple[float, float]]] = {}
    since: dict[int, float] = {}
    views: list[tuple[float, int, int, tuple[int, ...]]] = []
    counts: Counter[str] = Counter()
    outages: list[tuple[float, float]] = []
    left = set[int]()
    machines, again = dict[int, str](), list[tuple[int, int]]()
    marks: list[tuple[float, str, int]] = []
    last: float | None = None
    for entry in entries:
        at, event, member = float(entry.get("at", 0.0)), entry["event"], entry.get("member", -1)
        if event == "restart" and last is not None:
            outages.append((last, at))
        last, end = at, max(end, at)
        if event == "end":  # what follows are workers that go
            break
        left |= {member} if event == "leave" else set()
        if event == "lost" and member in left:
            event = "gone"
        counts[event] += 1
        if event in ("join", "lost", "ban", "leave", "restart") or (event == "begin" and entry["epoch"] > 1):
            marks.append((at, event, member))
        if event in ("join", "back"):
            since.setdefault(member, at)
            machines |= {member: str(entry["machine"])} if "machine" in entry else {}
        elif event in ("lost", "gone", "ban") and member in since:
            present.setdefault(member, []).append((since.pop(member), at))
        elif event == "view":
            view = entry["view"]
            views.append((at, view["number"], view["since"], tuple(view["members"])))
        elif event in ("begin", "serve"):
            views.append((at, entry.get("epoch", 0), entry["step"], tuple(entry["members"])))
            again += [(entry["reached"], entry["step"])] if marks[-1:] == [(at, "begin", -1)] else []
        elif event == "decision":
            decision = entry["decision"]
            counts["retry"] += decision["outcome"] == "retry" and (decision["attempt"] > 1 or not decision["steps"])
    for member, at in since.items():
        present.setdefault(member, []).append((at, end))
    return RunHistory(
        present=present,
        views=views,
        counts=counts,
        end=end,
        outages=outages,
        machines=machines,
        marks=marks,
        again=again,
    )


@dataclass(frozen=True, kw_only=True)
class RoundCounts:
    """The rounds of a run by outcome: whole, alone (no partner), or an error's name. steps, seconds: of computing.
    size: bytes of the `transfers` of states. out_of_turn: rounds on unassigned data.
    """

    rounds: int
    outcomes: Counter[str]
    out_of_turn: int
    steps: int
    seconds: float
    transfers: int
    size: int

    @property
    def alone(self) -> float:
        """Share of the rounds in which a worker used no other worker's work."""
        return 1.0 - (self.outcomes[WHOLE] + self.outcomes[LATE]) / self.rounds if self.rounds else 0.0


def ledger(records: Sequence[RoundRecord | StartRecord]) -> RoundCounts:
    """Count the rounds and state transfers in all records of a run."""
    rounds = [record for record in records if isinstance(record, RoundRecord)]
    transfers = [record for record in records if isinstance(record, StartRecord) and record.donor >= 0]
    return RoundCounts(
        rounds=len(rounds),
        outcomes=Counter(record.outcome for record in rounds),
        out_of_turn=sum(record.view < 0 for record in rounds),
        steps=sum(record.steps for record in rounds),
        seconds=sum(record.seconds for record in rounds),
        transfers=len(transfers),
        size=sum(record.size for record in transfers),
    )


Clock = Mapping[tuple[int, int], int]
"""By member and the first round of one of its states: up to which round the work done with that state is included."""


def in_model(records: Sequence[RoundRecord | StartRecord], members: Iterable[int]) -> int:
    """Inner steps whose work is in the last weights of any of `members`: their own, and those of others that they have
    taken in by exchanges, or with the state of a donor.
    """
    starts = {(one.member, one.first): one for one in records if isinstance(one, StartRecord)}
    copied = {one.has for one in starts.values()}
    by_round: dict[int, list[RoundRecord]] = {}
    for record in records:
        if isinstance(record, RoundRecord):
            by_round.setdefault(record.round, []).append(record)
    clocks, states, done = dict[int, Clock](), dict[int, int](), list[tuple[tuple[int, int], RoundRecord]]()
    copies: dict[int, dict[int, Clock]] = {}
    for round, own in sorted(by_round.items()):
        for record in own:
            member, start = record.member, starts.pop((record.member, round), None)
            if start is not None or member not in clocks:
                states[member], there = round, copies.get(start.has, {}) if start is not None else {}
                clocks[member] = there.get(start.donor, next(iter(there.values()), {})) if start is not None else {}
            key = member, states[member]
            clocks[member] = {**clocks[member], key: round}
            done.append((key, record))
        shared: dict[tuple[int, ...], Clock] = {}
        for record in own:
            if record.outcome in (WHOLE, LATE) and record.members not in shared:
                shared[record.members] = _union(clocks.get(member, {}) for member in record.members)
        for record in own:
            if record.outcome in (WHOLE, LATE):
                clocks[record.member] = _union((shared[record.members], clocks[record.member]))
        if round in copied:
            copies[round] = dict(clocks)
    final = _union(clocks.get(member, {}) for member in members)
    return sum(record.steps for key, record in done if record.round <= final.get(key, -1))


def _union(clocks: Iterable[Clock]) -> Clock:
    found: dict[tuple[int, int], int] = {}
    for clock in clocks:
        for key, round in clock.items():
            found[key] = max(round, found.get(key, -1))
    return found


def goodput(counted: int, done: RoundCounts, there: RunHistory) -> float:
    """Share of the workers' connected time that they spent in steps that count.

    counted: inner steps whose work is in the final weights. All steps are taken to be equally long; unreported steps of
    a dead worker do not count as computing.
    """
    seconds = sum(until - since for stretches in there.present.values() for since, until in stretches)
    share = min(counted / done.steps, 1.0) if done.steps else 0.0
    return done.seconds * share / seconds if seconds else 0.0
