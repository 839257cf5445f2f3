"""One replay of time: planned exchanges, message by message, over the lines of the virtual clock. No tensors, no torch.

    exchanges -> what each worker does (compute, start, wait) -> messages over pipes and topology -> Waits

So `isles train --dry-run` says what the virtual clock will show, and `isles plan` what it would. Left out: what a
method does in evaluations, pauses, jitter of the steps. A run of many steps is played in part: its beginning, some
rounds, its end; what is between is taken to wait as the later half of those rounds did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from isles.network.engine import LAST
from isles.network.planner.planned import PlannedExchange, Rhythm
from isles.network.planner.stages import StagedSteps, SteadyStep
from isles.network.planner.wire import PlannedWire
from isles.network.planner.worker import PLAYED, Agenda, PlannedWorker
from isles.network.topology import Topology

MESSAGES = 100_000
"""Two or three seconds."""
_ROUNDS = 3  # of a run that is played in part, at least
_FACTOR = 4  # on MESSAGES, that so few rounds may take
_SETTLING, _SETTLED = 3, 6  # steps before those are alike, and then

ExchangeRecords = Callable[[int], Sequence[PlannedExchange]]
"""The exchanges of a run of so many inner steps, in the order of their starts."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds. computed[r]: of each inner step at worker r. waited[r][t]: at worker r in inner step t = 1, 2, ... and
    after it; the last is at the end of the run, and waited[r][0], before the first step, is not counted. for_stages:
    what of that is for messages of other stages.
    """

    steps: int
    computed: tuple[float, ...]
    waited: tuple[tuple[float, ...], ...]
    for_stages: tuple[tuple[float, ...], ...]
    messages: int

    def waiting(self, first: int = 1, last: int | None = None) -> float:
        """After the steps `first` to `last` (None: and at the end), mean over the workers."""
        return self.account_of(first, last).waiting

    def account_of(self, first: int, last: int | None) -> TimeAccount:
        """Waiting after the steps `first` to `last`, and no computing."""
        stop = None if last is None else last + 1
        waiting, for_stages = (
            sum(sum(moments[first:stop]) for moments in rows) / len(rows) for rows in (self.waited, self.for_stages)
        )
        return TimeAccount(0.0, waiting, for_stages)

    @property
    def step_seconds(self) -> float:
        """Mean over the workers."""
        return sum(self.computed) / len(self.computed)

    @property
    def account(self) -> TimeAccount:
        """Of all of it."""
        return replace(self.account_of(1, None), computing=self.steps * self.step_seconds)


@dataclass(frozen=True, slots=True)
class TimeAccount:
    """Seconds of a worker, on average. for_stages: what of the waiting is for messages of other stages."""

    computing: float
    waiting: float
    for_stages: float = 0.0

    def plus(self, times: float, other: TimeAccount) -> TimeAccount:
        """With so many times another's."""
        return TimeAccount(
            self.computing + times * other.computing,
            self.waiting + times * other.waiting,
            self.for_stages + times * other.for_stages,
        )

    @property
    def share(self) -> float:
        """Of the time, spent computing; 1 for no time at all."""
        total = self.computing + self.waiting
        return self.computing / total if total else 1.0


@dataclass(frozen=True, slots=True)
class RunReplay:
    """Runs over the lines of `topology`, replayed.

    step_seconds: of each worker, of a whole replica's step where it is `staged`. opening: exchanges before the first
    step, one after the other; they are not counted, but part the workers' starts and number the messages. seed: of the
    jitter. messages: that are played of a run, or few more.
    """

    topology: Topology
    step_seconds: Sequence[float]
    opening: Sequence[PlannedExchange] = ()
    seed: int = 0
    staged: StagedSteps | None = None
    messages: int = MESSAGES

    def waits(self, exchanges: Sequence[PlannedExchange], steps: int, steady: SteadyStep | None = None) -> Waits:
        """In `steps` inner steps. steady: stands for most steps of each row without an exchange."""
        wire = PlannedWire(self.topology, self.seed)
        agenda = Agenda(self.opening, exchanges)
        workers = [
            PlannedWorker(wire, rank, agenda.acts(steps), each, self.staged, steady)
            for rank, each in enumerate(self.step_seconds)
        ]
        for worker in workers:
            wire.timeline.at(0.0, LAST, worker.rank, worker.turn)
        wire.timeline.run()
        waited, for_stages = (
            tuple(tuple(row[moment] for moment in range(steps + 2)) for row in rows)
            for rows in ([worker.waited for worker in workers], [worker.waited_for_stages for worker in workers])
        )
        shares = (1.0,) * len(workers) if self.staged is None else self.staged.computed
        computed = tuple(share * each for share, each in zip(shares, self.step_seconds, strict=True))
        return Waits(steps, computed, waited, for_stages, wire.messages)

    def run(self, records: ExchangeRecords, rhythm: Rhythm, steps: int) -> TimeAccount | None:
        """Of a run of `steps` inner steps, played in part where it has more than `messages`. None where even a few
        rounds have many more.
        """
        every = rhythm.every
        rounds = max(steps - rhythm.start, 0) // every
        rest = steps - rounds * every
        steady = self._steady(every)
        played = _rounds(records, every, rest, rounds, self.messages, _played_messages(self.staged, every, steady))
        if played is None:
            return None
        taken = rest + played * every
        waits = self.waits(records(taken), taken, steady)
        account = replace(waits.account, computing=steps * waits.step_seconds)
        return account if played == rounds else account.plus(rounds - played, _later_half(waits, rest, every, played))

    def long_run(self, records: ExchangeRecords, rhythm: Rhythm, rounds: int = 20) -> TimeAccount | None:
        """Of one round of a run without an end: the later half of `rounds`, or fewer. None: see `run`."""
        start, every = rhythm

        def later(steps: int) -> list[PlannedExchange]:
            shifted = (one._replace(sent=one.sent - start, lands=one.lands - start) for one in records(start + steps))
            return [one for one in shifted if one.sent > 0]

        steady = self._steady(every)
        played = _rounds(later, every, 0, rounds, self.messages, _played_messages(self.staged, every, steady))
        if played is None:
            return None
        taken = played * every
        waits = self.waits(later(taken), taken, steady)
        return replace(_later_half(waits, 0, every, played), computing=every * waits.step_seconds)

    def _steady(self, every: int) -> SteadyStep | None:
        """A step without an exchange, the mean over a few and the workers, where a few rounds of `every` steps have too
        many messages between stages.
        """
        staged = self.staged
        if staged is None or every <= PLAYED or _ROUNDS * every * staged.messages <= self.messages:
            return None
        waits = replace(self, opening=()).waits((), _SETTLED)
        kept = _SETTLED - _SETTLING
        whole = [sum(row[_SETTLING + 1 : _SETTLED + 1]) / kept for row in waits.waited]
        for_stages = tuple(sum(row[_SETTLING + 1 : _SETTLED + 1]) / kept for row in waits.for_stages)
        each = [computed + waited for computed, waited in zip(waits.computed, whole, strict=True)]
        return SteadyStep(max(sum(each) / len(each), *waits.computed), waits.computed, for_stages)


def _played_messages(staged: StagedSteps | None, every: int, steady: SteadyStep | None) -> int:
    """Between stages, of a round."""
    if staged is None:
        return 0
    return staged.messages * (every if steady is None else min(every, PLAYED))


def _rounds(
    records: ExchangeRecords, every: int, rest: int, rounds: int, messages: int, between_stages: int
) -> int | None:
    """How many of the `rounds` of `every` steps to play beside `rest` other steps. between_stages: messages of a
    round.
    """
    if rounds <= _ROUNDS:
        fixed, each = 0, sum(one.messages for one in records(rest + rounds * every)) / max(rounds, 1)
    else:
        some, more = (sum(one.messages for one in records(rest + count * every)) for count in (1, 3))
        each = (more - some) / 2
        fixed = some - each
    each += between_stages
    if fixed + min(rounds, _ROUNDS) * each > _FACTOR * messages:
        return None
    return min(rounds, max(_ROUNDS, int((messages - fixed) / each))) if each > 0 else min(rounds, _ROUNDS)


def _later_half(waits: Waits, start: int, every: int, rounds: int) -> TimeAccount:
    """Waiting of a round there. The last one is left out: what is due in it may wait for the end."""
    first, last = rounds // 2, rounds - 1
    whole = waits.account_of(start + first * every + 1, start + last * every)
    return TimeAccount(0.0, 0.0).plus(1 / (last - first), whole)
