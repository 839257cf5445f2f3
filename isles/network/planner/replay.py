"""One replay of time: planned exchanges, message by message, over the lines of the virtual clock. No tensors, no torch.

    exchanges -> what each worker does (compute, start, wait) -> messages over pipes and topology -> Waits

So `isles train --dry-run` says what the virtual clock will show, and `isles plan` what it would. Left out: what a
method does in evaluations, pauses, jitter of the steps. A run of many steps is played in part: its beginning, some
rounds, its end; what is between is taken to wait as the later half of those rounds did.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from isles.network.planner.planned import PlannedExchange, Rhythm
from isles.network.planner.wire import TURN, PlannedMember, PlannedTransfer, PlannedWire, play
from isles.network.topology import Topology

MESSAGES = 100_000
"""That are played of a run, or few more: two or three seconds."""
_ROUNDS = 3  # of a run that is played in part, at least
_FACTOR = 4  # on MESSAGES, that so few rounds may take

ExchangeRecords = Callable[[int], Sequence[PlannedExchange]]
"""The exchanges of a run of so many inner steps, in the order of their starts."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds. computed[r]: of each inner step at worker r. waited[r][t]: at worker r after inner step t = 1, 2, ...;
    the last is at the end of the run, and waited[r][0], before the first step, is not counted.
    """

    steps: int
    computed: tuple[float, ...]
    waited: tuple[tuple[float, ...], ...]
    messages: int

    def waiting(self, first: int = 1, last: int | None = None) -> float:
        """After the steps `first` to `last` (None: and at the end), mean over the workers."""
        stop = None if last is None else last + 1
        return sum(sum(moments[first:stop]) for moments in self.waited) / len(self.waited)

    @property
    def step_seconds(self) -> float:
        """Mean over the workers."""
        return sum(self.computed) / len(self.computed)

    @property
    def account(self) -> TimeAccount:
        """Of all of it."""
        return TimeAccount(self.steps * self.step_seconds, self.waiting())


@dataclass(frozen=True, slots=True)
class TimeAccount:
    """Seconds of a worker, on average."""

    computing: float
    waiting: float

    @property
    def share(self) -> float:
        """Of the time, spent computing; 1 for no time at all."""
        total = self.computing + self.waiting
        return self.computing / total if total else 1.0


def replay(
    exchanges: Sequence[PlannedExchange],
    topology: Topology,
    step_seconds: Sequence[float],
    steps: int,
    opening: Sequence[PlannedExchange] = (),
    seed: int = 0,
) -> Waits:
    """A run of `steps` inner steps. step_seconds: of each worker. opening: exchanges before the first step, one after
    the other; they are not counted, but part the workers' starts and number the messages. seed: of the jitter.
    """
    wire = PlannedWire(len(step_seconds), topology, seed)
    agenda = Agenda(opening, exchanges)
    workers = [_Worker(wire, rank, agenda.acts(steps), each) for rank, each in enumerate(step_seconds)]
    for worker in workers:
        wire.at(0.0, TURN, worker.rank, worker.turn)
    wire.run()
    waited = tuple(tuple(worker.waited[moment] for moment in range(steps + 2)) for worker in workers)
    return Waits(steps, tuple(step_seconds), waited, wire.messages)


def replay_run(
    records: ExchangeRecords,
    rhythm: Rhythm,
    topology: Topology,
    step_seconds: Sequence[float],
    steps: int,
    opening: Sequence[PlannedExchange] = (),
    seed: int = 0,
    messages: int = MESSAGES,
) -> TimeAccount | None:
    """Of a run of `steps` inner steps, played in part where it has more than `messages`. None where even a few rounds
    have many more.
    """
    every = rhythm.every
    rounds = max(steps - rhythm.start, 0) // every
    rest = steps - rounds * every
    played = _rounds(records, every, rest, rounds, messages)
    if played is None:
        return None
    taken = rest + played * every
    waits = replay(records(taken), topology, step_seconds, taken, opening, seed)
    later = 0.0 if played == rounds else _later_half(waits, rest, every, played)
    return TimeAccount(steps * waits.step_seconds, waits.waiting() + (rounds - played) * later)


def long_run(
    records: ExchangeRecords,
    rhythm: Rhythm,
    topology: Topology,
    step_seconds: Sequence[float],
    opening: Sequence[PlannedExchange] = (),
    seed: int = 0,
    messages: int = MESSAGES,
    rounds: int = 20,
) -> TimeAccount | None:
    """Of one round of a run without an end: the later half of `rounds`, or fewer. None: see `replay_run`."""
    every = rhythm.every
    played = _rounds(records, every, rhythm.start, rounds, messages)
    if played is None:
        return None
    taken = rhythm.start + played * every
    waits = replay(records(taken), topology, step_seconds, taken, opening, seed)
    return TimeAccount(every * waits.step_seconds, _later_half(waits, rhythm.start, every, played))


def _rounds(records: ExchangeRecords, every: int, rest: int, rounds: int, messages: int) -> int | None:
    """How many of the `rounds` of `every` steps to play beside `rest` other steps."""
    if rounds <= _ROUNDS:
        fixed, each = 0, sum(one.messages for one in records(rest + rounds * every)) / max(rounds, 1)
    else:
        some, more = (sum(one.messages for one in records(rest + count * every)) for count in (1, 3))
        each = (more - some) / 2
        fixed = some - each
    if fixed + min(rounds, _ROUNDS) * each > _FACTOR * messages:
        return None
    return min(rounds, max(_ROUNDS, int((messages - fixed) / each))) if each > 0 else min(rounds, _ROUNDS)


def _later_half(waits: Waits, start: int, every: int, rounds: int) -> float:
    """Waiting of a round there. The last one is left out: what is due in it may wait for the end."""
    first, last = rounds // 2, rounds - 1
    return waits.waiting(start + first * every + 1, start + last * every) / (last - first)


class Agenda:
    """What every worker does, in turn: computes, starts exchanges, waits for them."""

    def __init__(self, opening: Sequence[PlannedExchange], exchanges: Sequence[PlannedExchange]) -> None:
        self._amid: defaultdict[int, list[tuple[int, PlannedExchange]]] = defaultdict(list)
        self._after: defaultdict[int, list[tuple[int, PlannedExchange]]] = defaultdict(list)
        for number, one in enumerate((*opening, *exchanges)):
            moment = math.ceil(one.sent)
            (self._after if one.sent == moment else self._amid)[moment].append((number, one))
        self._moments = sorted({*self._amid, *self._after, *(one.lands for one in exchanges)})

    def acts(self, steps: int) -> Iterator[Act]:
        """Of a run of so many inner steps; moment 0 is the opening."""
        flying: list[tuple[int, PlannedExchange]] = []

        def land(moment: int, but: int | None = None) -> Iterator[Act]:
            nonlocal flying
            due = [held for held in flying if held[1].lands <= moment and held[1].flight != but]
            if due:
                flying = [held for held in flying if held[1].lands > moment or held[1].flight == but]
            for number, _ in due:
                yield Act(min(moment, steps + 1), waits_for=number)

        at = 0.0
        for moment in [moment for moment in self._moments if moment <= steps + 1]:
            for number, one in self._amid.get(moment, ()):
                yield Act(moment, computes=one.sent - at, starts=(number, one))
                at = one.sent
                flying.append((number, one))
            if at < min(moment, steps):
                yield Act(moment, computes=min(moment, steps) - at)
                at = float(min(moment, steps))
            todo = self._after.get(moment, ())
            for place, (number, one) in enumerate(todo):
                if not place or todo[place - 1][1].flight != one.flight:
                    yield from land(moment, but=one.flight)
                yield Act(moment, starts=(number, one))
                flying.append((number, one))
            yield from land(moment)
        if at < steps:
            yield Act(steps, computes=steps - at)
        yield from land(steps + 2)


class Act(NamedTuple):
    """One of them, in the order of the fields. computes: inner steps. starts, waits_for: exchanges, by number."""

    moment: int
    computes: float = 0.0
    starts: tuple[int, PlannedExchange] | None = None
    waits_for: int | None = None


class _Worker:
    """Acts an agenda out; exchanges in which it is alone take no time."""

    def __init__(self, wire: PlannedWire, rank: int, acts: Iterator[Act], step_seconds: float) -> None:
        self.rank, self.waited = rank, defaultdict[int, float](float)
        self._wire, self._acts, self._step_seconds = wire, acts, step_seconds
        self._act: Act | None = None  # which computes
        self._flying: dict[int, PlannedTransfer] = {}
        self._since: tuple[int, float] | None = None

    def turn(self) -> None:
        """Go on, until something takes time."""
        wire = self._wire
        if self._since is not None:
            moment, since = self._since
            self._since = None
            self.waited[moment] += wire.now - since
        if self._act is not None:
            act, self._act = self._act, None
            self._start(act)
        for act in self._acts:
            if act.computes > 0:
                self._act = act
                wire.at(wire.now + act.computes * self._step_seconds, TURN, self.rank, self.turn)
                return
            self._start(act)
            transfer = None if act.waits_for is None else self._flying.pop(act.waits_for, None)
            if transfer is not None and not transfer.done:
                self._since = act.moment, wire.now
                transfer.on_end = self._wake
                return

    def _start(self, act: Act) -> None:
        if act.starts is None:
            return
        number, one = act.starts
        group = next((group for group in one.groups if self.rank in group), ())
        if len(group) > 1:
            member = PlannedMember(self._wire, group, group.index(self.rank), number, one.channel)
            self._flying[number] = PlannedTransfer(play(one.pattern(len(group)), member))

    def _wake(self) -> None:
        self._wire.at(self._wire.now, TURN, self.rank, self.turn)
