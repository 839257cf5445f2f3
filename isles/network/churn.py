"""Workers that come and go: when workers join, die, leave or pause, for the virtual clock and the planner.

A trace is a file of JSON lines, ordered by time; times are seconds since the start. Workers are numbered in the order
in which they joined (the founders of N are 0 .. N - 1, the next joiner is N):

    {"at": 12.5, "join": 1}            so many workers ask to join
    {"at": 60, "kill": 3}              worker 3 dies without notice
    {"at": 61, "leave": 0}             worker 0 announces that it leaves
    {"at": 70, "pause": 2}             worker 2 is suspended (a closed lid) ...
    {"at": 90, "resume": 2}            ... and continues with its state
    {"at": 95, "lighthouse": 8}        the lighthouse is down for so many seconds

`churn` reads such a file, or makes a trace from a rate ("10%/h": each worker dies at that rate and another one joins in
its stead) or from a pool whose size changes as planned, after the adaptive pools of DiLoCo (arXiv 2311.08105):
constant, doubling, halving, ramping up and down. Here all compute the same in total, so that only the order differs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from isles.base.errors import unknown_name
from isles.base.parsing import parse_json
from isles.network.noise import uniform

Change = Literal["join", "kill", "leave", "pause", "resume", "lighthouse"]
KINDS: tuple[Change, ...] = get_args(Change)
POOLS: dict[str, tuple[float, ...]] = {
    # the share of the pool in ten equal parts of a run; each adds up to 7.5 pools of a tenth, so all compute the same
    "constant": (0.75,) * 10,
    "doubling": (0.5,) * 5 + (1.0,) * 5,
    "halving": (1.0,) * 5 + (0.5,) * 5,
    "ramp-up": (0.5, 0.55, 0.6, 0.7, 0.7, 0.8, 0.8, 0.9, 0.95, 1.0),
    "ramp-down": (1.0, 0.95, 0.9, 0.8, 0.8, 0.7, 0.7, 0.6, 0.55, 0.5),
}
_DEATHS, _DELAYS = 0x64656174, 0x64656C61  # streams of random numbers of their own
_RATE = re.compile(r"\s*([0-9.]+)\s*%\s*/\s*(s|min|h|d|day|year)\s*")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "day": 86400.0, "year": 365 * 86400.0}


@dataclass(frozen=True, slots=True, order=True)
class ChurnEvent:
    """Something that happens to a worker.

    Args:
        at: seconds from the start.
        kind: what happens.
        number: the worker; for "join" the number of joiners, for "lighthouse" the seconds that it is down.
    """

    at: float
    kind: Change
    number: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Independent deaths at a constant rate. Another worker joins in the place of each dead one.

    per_second: deaths per worker and second. repair: mean seconds until the replacement joins, exponential; 0: at once.
    """

    per_second: float
    repair: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.per_second < math.inf or not 0 <= self.repair < math.inf:
            raise ValueError(
                f"churn: rate {self.per_second}/s, repair {self.repair} s: both must be finite and 0 or more"
            )

    def events(self, workers: int, seconds: float, seed: int) -> list[ChurnEvent]:
        """The trace of `workers` founders over `seconds`. A longer trace of the same seed begins with the shorter
        one.
        """
        events: list[ChurnEvent] = []
        deaths = [self._death(0.0, number, seed) for number in range(workers)]
        joins: list[float] = []
        number = workers
        while True:
            die = min(deaths, default=(math.inf, -1))
            join = min(joins, default=math.inf)
            at = min(die[0], join)
            if at >= seconds:
                return events
            if die[0] <= join:
                deaths.remove(die)
                events.append(ChurnEvent(at, "kill", die[1]))
                joins.append(at + (self.repair and -self.repair * math.log(uniform(seed, die[1], _DELAYS))))
            else:
                joins.remove(join)
                events.append(ChurnEvent(at, "join", 1))
                deaths.append(self._death(at, number, seed))
                number += 1

    def _death(self, since: float, number: int, seed: int) -> tuple[float, int]:
        if self.per_second == 0:
            return math.inf, number
        return since - math.log(uniform(seed, number, _DEATHS)) / self.per_second, number


def churn(name: str, *, workers: int, seconds: float, seed: int = 0) -> list[ChurnEvent]:
    """A trace of workers that come and go.

    Args:
        name: a file, a rate ("10%/h", "1%/h, repair 600"), or one of `POOLS`.
        workers: founders; of a pool: its largest size.
        seconds: length of the run.
        seed: of the random times.

    Raises:
        ValueError: one line, for an unknown name or a file with an impossible event.
    """
    rate = rate_of(name)
    if rate is not None:
        return rate.events(workers, seconds, seed)
    if name in POOLS:
        return pool(POOLS[name], workers=workers, seconds=seconds)
    if Path(name).suffix in (".jsonl", ".json"):
        return read_trace(name, workers=workers)
    raise ValueError(unknown_name("churn", name, list(POOLS)) + ", a rate such as 10%/h, or a .jsonl file")


def rate_of(name: str) -> Poisson | None:
    """The churn of rate `name` ("10%/h", "1%/h, repair 600"); None for another name. ValueError for a malformed
    repair.
    """
    rate, _, rest = name.partition(",")
    found = _RATE.fullmatch(rate)
    if found is None:
        return None
    repair = re.fullmatch(r"\s*repair\s+([0-9.]+)\s*s?\s*", rest) if rest else None
    if rest and repair is None:
        raise ValueError(f"churn = {name!r}: after the rate comes 'repair SECONDS', such as '10%/h, repair 600'")
    share = float(found[1]) / 100 / _SECONDS[found[2]]
    return Poisson(per_second=share, repair=float(repair[1]) if repair else 0.0)


def founders(name: str, workers: int) -> int:
    """The number of workers with which a run of `churn(name, workers=...)` begins: a pool may start smaller."""
    return max(round(POOLS[name][0] * workers), 1) if name in POOLS else workers


def pool(shares: Sequence[float], *, workers: int, seconds: float) -> list[ChurnEvent]:
    """A pool whose size follows `shares` of `workers` in equal parts of `seconds`: planned joins and leaves. The first
    share is the founders'; the latest joiner leaves first.
    """
    sizes = [max(round(share * workers), 1) for share in shares]
    here = list(range(sizes[0]))
    coming = sizes[0]
    events: list[ChurnEvent] = []
    for part, size in enumerate(sizes[1:], start=1):
        at = seconds * part / len(sizes)
        if size > len(here):
            events.append(ChurnEvent(at, "join", size - len(here)))
            here += range(coming, coming + size - len(here))
            coming = here[-1] + 1
        while len(here) > size:
            events.append(ChurnEvent(at, "leave", here.pop()))
    return events


def read_trace(path: str, *, workers: int) -> list[ChurnEvent]:
    """The events of a file of JSON lines, as `write_trace` writes it.

    Raises:
        ValueError: naming the file, the line, and what to write.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ValueError(f"{path}: cannot be read ({reason}); name a file of JSON lines") from None
    events = [_event(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    check(events, workers=workers, path=path)
    return events


def write_trace(events: Iterable[ChurnEvent], path: str) -> None:
    """A file that `read_trace` reads back."""
    lines = (json.dumps({"at": event.at, event.kind: event.number}) for event in events)
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def check(events: Sequence[ChurnEvent], *, workers: int, path: str = "churn") -> None:
    """ValueError if a trace goes back in time, or an event does not fit its worker's state."""
    here, still = set(range(workers)), set[int]()
    coming, at = workers, 0.0
    for event in events:
        if event.at < at:
            raise ValueError(f"{path}: {event.kind} at {event.at:g} s comes after {at:g} s; order the lines by time")
        at = event.at
        number = int(event.number)
        if event.kind == "join":
            here |= set(range(coming, coming + number))
            coming += number
        elif event.kind != "lighthouse":
            allowed = still if event.kind == "resume" else here if event.kind == "kill" else here - still
            if number not in allowed:
                raise ValueError(
                    f"{path}: {event.kind} of worker {number} at {at:g} s: {_refusal(number, here, still)}"
                )
            still = still | {number} if event.kind == "pause" else still - {number}
            here = here - {number} if event.kind in ("kill", "leave") else here


def _refusal(number: int, here: set[int], still: set[int]) -> str:
    if number in still:
        return "it is paused; resume it first"
    return "it is not paused" if number in here else "there is no such worker then"


def _event(line: str, where: str) -> ChurnEvent:
    try:
        value: Any = parse_json(line)
    except ValueError:
        value = None
    kinds = [kind for kind in KINDS if isinstance(value, dict) and kind in value]
    if not isinstance(value, dict) or len(kinds) != 1 or value.keys() != {"at", kinds[0]}:
        raise ValueError(f'{where}: {line.strip()[:60]!r} is no event; write for example {{"at": 60, "kill": 3}}')
    kind = kinds[0]
    at, number = value["at"], value[kind]
    if not _is_number(at) or at < 0:
        raise ValueError(f"{where}: at = {at!r}: choose seconds from the start, 0 or more")
    whole = isinstance(number, int) or kind == "lighthouse"
    if not _is_number(number) or not whole or number < (1 if kind == "join" else 0):
        raise ValueError(f"{where}: {kind} = {number!r}: choose a number, such as 1")
    return ChurnEvent(float(at), kind, number)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Returns:
    """A trace for workers whose lease expires: a worker that pauses for longer than its lease is lost to the others,
    and joins as a new member once it resumes.

    events: of the trace, with a kill when a lease expires; later events of that worker have its new number. begins: by
    worker, when it joins (s), with rejoined workers last. machines: by worker, the number of the first worker on its
    machine.
    """

    events: tuple[ChurnEvent, ...]
    begins: tuple[float, ...]
    machines: tuple[int, ...]


def returns(trace: Iterable[ChurnEvent], begins: Sequence[float], lease: float) -> Returns:
    """Apply a lease to a trace. begins: when each worker joins, seconds. lease: the longest tolerated pause,
    seconds.
    """
    events: list[ChurnEvent] = []
    came, machines = list(begins), list(range(len(begins)))
    who = list(machines)  # the trace's number -> the present number
    paused: dict[int, float] = {}
    for event in trace:
        if event.kind in ("join", "lighthouse"):
            events.append(event)
            continue
        number = int(event.number)
        own = replace(event, number=who[number])
        if event.kind != "resume":
            events.append(own)
            if event.kind == "pause":
                paused[number] = event.at
            continue
        end = paused.pop(number) + lease
        if event.at <= end:
            events.append(own)
            continue
        events += _expired(who[number], end)
        who[number] = len(came)
        came.append(event.at)
        machines.append(number)
    for number, since in paused.items():
        events += _expired(who[number], since + lease)
    return Returns(tuple(sorted(events, key=lambda event: event.at)), tuple(came), tuple(machines))


def _expired(number: int, at: float) -> list[ChurnEvent]:
    """The pause ends because the worker is killed."""
    return [ChurnEvent(at, "resume", number), ChurnEvent(at, "kill", number)]
