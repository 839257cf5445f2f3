"""What an elastic run records beside its views, for its report, Goodput and replay. Pure functions.

RUN/members.jsonl      the coordinator's entries, each with its moment `at`
RUN/exchanges.jsonl    a `RoundRecord` for each round of each worker, a `StartRecord` for each state that one began
with
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from operator import or_
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


def begun_again(records: Iterable[RoundRecord | StartRecord], newest: int = 0) -> dict[int, tuple[int, int]]:
    """Each time that a run began again with the state of no member: by its first round, the round that had been
    reached, and that of the state. records: in their order, the first ones after the round `newest`.
    """
    begun: dict[int, tuple[int, int]] = {}
    for record in records:
        if isinstance(record, RoundRecord):
            newest = max(newest, record.round)
        elif record.donor < 0 and 0 < newest < record.first:
            begun.setdefault(record.first, (newest, record.has))
    return begun


@dataclass(kw_only=True)
class RunHistory:
    """The contents of `members.jsonl`. present: by member, intervals (from, until) in seconds of its connection. views:
    (moment, number, first round, members); of a swarm (moment, epoch, step, members). counts: of entries by event;
    "retry": decisions to repeat a round. outages: of the lighthouse, (last entry, restart). machines: names by member.
    marks: (moment, event, member, or -1) of joins, losses, bans, leaves, restarts, and of swarms that began again.
    again: inner steps (reached, begun from) where the run began again.
    """

    present: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    views: list[tuple[float, int, int, tuple[int, ...]]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    end: float = 0.0
    outages: list[tuple[float, float]] = field(default_factory=list)
    machines: dict[int, str] = field(default_factory=dict)
    marks: list[tuple[float, str, int]] = field(default_factory=list)
    again: list[tuple[int, int]] = field(default_factory=list)

    def name(self, member: int) -> str:
        """A member and its machine, as a reader knows it; "" for -1."""
        if member < 0:
            return ""
        return f"member {member}" + (f" ({self.machines[member]})" if self.machines.get(member) else "")


def read_history(
    entries: Iterable[Mapping[str, Any]], records: Sequence[RoundRecord | StartRecord] = (), sync_every: int = 1
) -> RunHistory:
    """entries: of the journal. records: of a run of whole replicas, with `sync_every` inner steps a round."""
    there = RunHistory(end=max((record.at for record in records), default=0.0))
    there.again = [(round * sync_every, has * sync_every) for round, has in begun_again(records).values()]
    since, left = dict[int, float](), set[int]()
    last: float | None = None
    for entry in entries:
        at, event, member = float(entry.get("at", 0.0)), entry["event"], entry.get("member", -1)
        if event == "restart" and last is not None:
            there.outages.append((last, at))
        last, there.end = at, max(there.end, at)
        if event == "end":  # what follows are workers that go
            break
        left |= {member} if event == "leave" else set()
        if event == "lost" and member in left:
            event = "gone"
        there.counts[event] += 1
        is_again = event == "begin" and entry["epoch"] > 1
        if event in ("join", "lost", "ban", "leave", "restart") or is_again:
            there.marks.append((at, event, member))
        if event in ("join", "back"):
            since.setdefault(member, at)
            there.machines |= {member: str(entry["machine"])} if "machine" in entry else {}
        elif event in ("lost", "gone", "ban") and member in since:
            there.present.setdefault(member, []).append((since.pop(member), at))
        elif event == "view":
            view = entry["view"]
            there.views.append((at, view["number"], view["since"], tuple(view["members"])))
        elif event in ("begin", "serve"):
            there.views.append((at, entry.get("epoch", 0), entry["step"], tuple(entry["members"])))
            there.again += [(entry["reached"], entry["step"])] if is_again else []
        elif event == "decision":
            decision = entry["decision"]
            is_retry = decision["outcome"] == "retry" and (decision["attempt"] > 1 or not decision["steps"])
            there.counts["retry"] += is_retry
    for member, at in since.items():
        there.present.setdefault(member, []).append((at, there.end))
    return there


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


def steps_in_model(records: Sequence[RoundRecord | StartRecord], members: Iterable[int]) -> int:
    """Inner steps whose work is in the last weights of any of `members`: their own, and those of others that they have
    taken in by exchanges, or with the state of a donor.

    A clock has, by member and the first round with one of its states, the last round whose work is included.
    """
    Clock = Counter[tuple[int, int]]
    starts = {(one.member, one.first): one for one in records if isinstance(one, StartRecord)}
    rounds = sorted((one for one in records if isinstance(one, RoundRecord)), key=lambda one: one.round)
    clocks, states = dict[int, Clock](), dict[int, tuple[int, int]]()
    copies: dict[int, dict[int, Clock]] = {one.has: {} for one in starts.values()}
    done: list[tuple[tuple[int, int], RoundRecord]] = []
    for round, together in groupby(rounds, key=lambda one: one.round):
        own = [*together]
        for record in own:
            member, start = record.member, starts.pop((record.member, round), None)
            if start is not None or member not in clocks:
                donor, has = (start.donor, start.has) if start is not None else (-1, -1)
                there = copies.get(has, {})
                states[member] = member, round
                clocks[member] = there.get(donor, next(iter(there.values()), Clock()))
            clocks[member] = clocks[member] | Clock({states[member]: round})
            done.append((states[member], record))
        before, shared = dict(clocks), [one for one in own if one.outcome in (WHOLE, LATE)]
        for group in {one.members for one in shared}:
            mean = reduce(or_, (before[one] for one in group if one in before), Clock())
            for record in shared:
                if record.members == group:
                    clocks[record.member] = clocks[record.member] | mean
        if round in copies:
            copies[round] = dict(clocks)
    final = reduce(or_, (clocks[one] for one in members if one in clocks), Clock())
    return sum(record.steps for state, record in done if record.round <= final[state])


def goodput(counted: int, done: RoundCounts, there: RunHistory) -> float:
    """Share of the workers' connected time that they spent in steps that count.

    counted: inner steps whose work is in the final weights. All steps are taken to be equally long; unreported steps of
    a dead worker do not count as computing.
    """
    seconds = sum(until - since for stretches in there.present.values() for since, until in stretches)
    share = min(counted / done.steps, 1.0) if done.steps else 0.0
    return done.seconds * share / seconds if seconds else 0.0
