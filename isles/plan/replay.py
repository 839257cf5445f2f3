"""Replay of a run's time: planned exchanges, message by message, over the links of the virtual clock. No tensors.

    exchanges -> what each worker does (compute, start, wait) -> messages over pipes and topology -> Waits

`isles train --dry-run` and `isles plan` use it to predict what the virtual clock would show. Not counted: what a method
does in evaluations, pauses, jitter of the steps. A long run is replayed in part: its beginning, some rounds, its end.
The rounds in between are assumed to wait like the later half of the replayed ones.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from isles.network.engine import LAST, EventQueue, Wire, WireMessage
from isles.network.exchange_plan import (
    Cross,
    Doubling,
    Mean,
    MessagePattern,
    PlannedExchange,
    Ragged,
    Rhythm,
    Ring,
    Swap,
    Then,
    Tree,
    Waves,
    fed,
    fed_by,
)
from isles.network.links import Topology
from isles.plan.pipeline_steps import StagedSteps, SteadyStep


class ReplayWork:
    """One end of a message. done: the message has left its sender, or has arrived."""

    __slots__ = ("done", "waiter")

    def __init__(self) -> None:
        self.done = False
        self.waiter: ReplayProtocol | None = None

    def finish(self) -> None:
        self.done = True
        if self.waiter is not None:
            waiter, self.waiter = self.waiter, None
            waiter.one_done()


ReplaySteps = Iterator[list[ReplayWork]]


class ReplayProtocol:
    """A protocol in progress at one worker. It continues whenever everything that it waits for is done."""

    __slots__ = ("_pending", "_steps", "done", "on_end")

    def __init__(self, steps: ReplaySteps) -> None:
        self._steps, self._pending = steps, 0
        self.done = False
        self.on_end: Callable[[], None] | None = None
        self._go()

    def one_done(self) -> None:
        self._pending -= 1
        if not self._pending:
            self._go()

    def _go(self) -> None:
        for works in self._steps:
            pending = [work for work in works if not work.done]
            if pending:
                self._pending = len(pending)
                for work in pending:
                    work.waiter = self
                return
        self.done = True
        if self.on_end is not None:
            on_end, self.on_end = self.on_end, None
            on_end()


class ReplayMessage(WireMessage):
    """key: identifies the receive."""

    __slots__ = ("key", "sent")

    def __init__(self, source: int, target: int, key: Hashable, channel: str, bits: float) -> None:
        super().__init__(source, target, channel, bits)
        self.key, self.sent = key, ReplayWork()


class ReplayWire(Wire[ReplayMessage]):
    """The links between the ranks of `topology`, and the clock.

    norms: by exchange, the time at which the last worker so far asked for a gradient norm.
    """

    def __init__(self, topology: Topology, seed: int) -> None:
        super().__init__(topology, seed, EventQueue())
        self.norms: dict[Hashable, float] = {}
        self._posted: dict[Hashable, ReplayWork] = {}
        self._arrived: set[Hashable] = set()

    def send(self, source: int, target: int, nbytes: float, key: Hashable, channel: str) -> ReplayWork:
        message = ReplayMessage(source, target, key, channel, 8.0 * nbytes)
        self.carry(message)
        return message.sent

    def recv(self, target: int, source: int, key: Hashable) -> ReplayWork:
        """Done when the message has arrived. A key is used once between two ranks."""
        work, key = ReplayWork(), (target, source, key)
        if key in self._arrived:
            self._arrived.discard(key)
            work.done = True
        else:
            self._posted[key] = work
        return work

    def left(self, message: ReplayMessage) -> None:
        message.sent.finish()

    def arrived(self, message: ReplayMessage) -> None:
        key = message.target, message.source, message.key
        work = self._posted.pop(key, None)
        if work is None:
            self._arrived.add(key)
        else:
            work.finish()


class ReplayMember:
    """Position `index` of `group` in one exchange, known by `key`."""

    def __init__(self, wire: ReplayWire, group: Sequence[int], index: int, key: Hashable, channel: str) -> None:
        self._wire, self._group, self._key, self._channel = wire, group, key, channel
        self.index, self.size = index, len(group)
        self.others = [(index + step) % self.size for step in range(1, self.size)]

    def send(self, position: int, nbytes: float, part: Hashable = 0) -> ReplayWork:
        source, target = self._group[self.index], self._group[position]
        return self._wire.send(source, target, nbytes, (self._key, part), self._channel)

    def recv(self, position: int, part: Hashable = 0) -> ReplayWork:
        return self._wire.recv(self._group[self.index], self._group[position], (self._key, part))

    def swap(self, sizes: Sequence[float], part: Hashable = 0) -> list[ReplayWork]:
        """Send sizes[p] to each other position p and receive theirs; receives come first, as in the transports."""
        works = [self.recv(position, part) for position in self.others]
        return works + [self.send(position, sizes[position], part) for position in self.others]

    def alike(self, nbytes: float, part: Hashable = 0) -> list[ReplayWork]:
        """Send `nbytes` to every other position and receive theirs."""
        return self.swap((nbytes,) * self.size, part)


def play(pattern: MessagePattern, member: ReplayMember) -> ReplaySteps:
    """The protocol of one member of the pattern's group; yields what it waits for, in order."""
    index, size = member.index, member.size
    if isinstance(pattern, Mean):
        yield from _mean(pattern, member, 0)
    elif isinstance(pattern, Swap):
        yield member.alike(pattern.sizes[index])
    elif isinstance(pattern, Cross):
        works = [member.recv(position) for position in member.others if pattern.sizes[position][index]]
        sizes = pattern.sizes[index]
        yield works + [member.send(position, sizes[position]) for position in member.others if sizes[position]]
    elif isinstance(pattern, Doubling):
        reach = 1
        while reach < size:
            nbytes = pattern.nbytes * min(reach, size - reach)
            yield [member.recv((index + reach) % size, reach), member.send((index - reach) % size, nbytes, reach)]
            reach *= 2
    elif isinstance(pattern, Waves):
        for wave, nbytes in enumerate(pattern.sizes):
            yield member.alike(nbytes, wave)
    elif isinstance(pattern, Ragged):
        heads = member.alike(pattern.header, "header")
        works = [member.send(position, pattern.nbytes) for position in member.others if pattern.nbytes]
        yield heads
        yield works + [member.recv(position) for position in member.others if pattern.nbytes]
    elif isinstance(pattern, Then):
        yield from _together([_mean(mean, member, part) for part, mean in enumerate(pattern.first)])
        yield from _mean(pattern.second, member, "second")
    elif isinstance(pattern, Tree):
        if index:
            yield [member.recv(fed_by(index))]
        yield [member.send(position, pattern.nbytes) for position in fed(index, size)]
    else:
        assert isinstance(pattern, Ring), pattern
        for step in range(2 * (size - 1)):
            each = pattern.nbytes / (2 * (size - 1))
            yield [member.recv((index - 1) % size, step), member.send((index + 1) % size, each, step)]


def _mean(pattern: Mean, member: ReplayMember, part: Hashable) -> ReplaySteps:
    headers = member.alike(pattern.header, (part, "header"))
    before: tuple[int, list[ReplayWork]] | None = None
    for index, (there, back) in enumerate(pattern.segments):
        tag = part, index
        works = member.alike(back[member.index], tag) if there is None else member.swap(list(there), tag)
        if before is None:
            yield headers  # the first segment is already in flight behind them
        else:
            yield from _finished(pattern, member, part, *before)
        before = index, works
    assert before is not None
    yield from _finished(pattern, member, part, *before)


def _finished(pattern: Mean, member: ReplayMember, part: Hashable, index: int, works: list[ReplayWork]) -> ReplaySteps:
    yield works
    there, back = pattern.segments[index]
    if there is not None:
        yield member.alike(back[member.index], (part, index, "back"))


def _together(protocols: list[ReplaySteps]) -> ReplaySteps:
    while protocols:
        waits, going = [], []
        for protocol in protocols:
            works = next(protocol, None)
            if works is not None:
                waits += works
                going.append(protocol)
        protocols = going
        if waits:
            yield waits


PLAYED = 4
"""With more steps than this in a row without an exchange, not every task of staged replicas is replayed."""


class Agenda:
    """The program of every worker, in order: compute, start exchanges, wait for them."""

    def __init__(self, opening: Sequence[PlannedExchange], exchanges: Sequence[PlannedExchange]) -> None:
        self._amid: defaultdict[int, list[tuple[int, PlannedExchange]]] = defaultdict(list)
        self._after: defaultdict[int, list[tuple[int, PlannedExchange]]] = defaultdict(list)
        for number, exchange in enumerate((*opening, *exchanges)):
            moment = math.ceil(exchange.sent)
            (self._after if exchange.sent == moment else self._amid)[moment].append((number, exchange))
        self._moments = sorted({*self._amid, *self._after, *(exchange.lands for exchange in exchanges)})

    def acts(self, steps: int) -> Iterator[Act]:
        """The acts of a run of `steps` inner steps; moment 0 is the opening."""
        flying: list[tuple[int, PlannedExchange]] = []

        def land(moment: int, left: Counter[int]) -> Iterator[Act]:
            """The exchanges that are due, except flights that still have something to send."""
            nonlocal flying
            due = [entry for entry in flying if entry[1].lands <= moment and not left[entry[1].flight]]
            if due:
                flying = [entry for entry in flying if entry[1].lands > moment or left[entry[1].flight]]
            for number, _ in due:
                yield Act(min(moment, steps + 1), waits_for=number)

        at = 0.0
        for moment in [moment for moment in self._moments if moment <= steps + 1]:
            for number, exchange in self._amid.get(moment, ()):
                yield Act(moment, computes=exchange.sent - at, starts=(number, exchange))
                at = exchange.sent
                flying.append((number, exchange))
            if at < min(moment, steps):
                yield Act(moment, computes=min(moment, steps) - at)
                at = float(min(moment, steps))
            starting = self._after.get(moment, ())
            left = Counter(exchange.flight for _, exchange in starting)
            for index, (number, exchange) in enumerate(starting):
                if not index or starting[index - 1][1].flight != exchange.flight:
                    yield from land(moment, left)
                yield Act(moment, starts=(number, exchange))
                flying.append((number, exchange))
                left[exchange.flight] -= 1
            yield from land(moment, left)
        if at < steps:
            yield Act(steps, computes=steps - at)
        yield from land(steps + 2, Counter())


class Act(NamedTuple):
    """The actions of a worker at one moment, in the order of the fields. computes: inner steps. starts, waits_for:
    numbers of exchanges.
    """

    moment: int
    computes: float = 0.0
    starts: tuple[int, PlannedExchange] | None = None
    waits_for: int | None = None


class ReplayWorker:
    """Executes an agenda. Exchanges of a single worker take no time. steady: stands for steps without task replay."""

    def __init__(
        self,
        wire: ReplayWire,
        rank: int,
        acts: Iterator[Act],
        step_seconds: float,
        staged: StagedSteps | None,
        steady: SteadyStep | None,
    ) -> None:
        self.rank = rank
        self.waited = defaultdict[int, float](float)
        self.waited_for_stages = defaultdict[int, float](float)
        self._wire, self._step_seconds, self._staged, self._steady = wire, step_seconds, staged, steady
        self._program = self._execute(acts)
        self._flying: dict[int, ReplayProtocol] = {}
        self._since: float | None = None
        self._moment, self._for_stages = 0, False
        self._norm_key: Hashable = None
        """The current wait: after which step, whether for a message of a stage, and the key of a gradient norm."""
        self._at, self._done = 0.0, 0
        """Inner steps computed; tasks of the next one that are done."""
        self._sends: list[ReplayWork] = []

    def advance(self) -> None:
        """Continue until something takes time."""
        wire = self._wire
        if self._since is not None:
            seconds = wire.timeline.now - self._since
            # A worker that asks for the norm waits for the stages that still compute, and then for the answers.
            last_request = wire.norms.get(self._norm_key, self._since)
            self._wait(self._moment, seconds, seconds if self._for_stages else max(last_request - self._since, 0.0))
            self._since = None
        for action in self._program:
            if isinstance(action, float):
                wire.timeline.at(wire.timeline.now + action, LAST, self.rank, self.advance)
                return
            if not action.done:
                self._since = wire.timeline.now
                action.on_end = self._wake
                return

    def _wait(self, moment: int, seconds: float, for_stages: float) -> None:
        self.waited[moment] += seconds
        self.waited_for_stages[moment] += for_stages

    def _execute(self, acts: Iterator[Act]) -> Iterator[float | ReplayProtocol]:
        """Yields seconds of computing, and protocols to wait for."""
        for act in acts:
            if act.computes > 0:
                yield from self._computes(act.computes)
            if act.starts is not None:
                self._start(*act.starts)
            transfer = None if act.waits_for is None else self._flying.pop(act.waits_for, None)
            if transfer is not None:
                self._moment, self._for_stages, self._norm_key = act.moment, False, act.waits_for
                yield transfer

    def _computes(self, steps: float) -> Iterator[float | ReplayProtocol]:
        if self._staged is None:
            yield steps * self._step_seconds
            return
        until = round(self._at + steps, 9)
        whole = math.floor(until) - math.floor(self._at)
        played = whole if self._steady is None else min(whole, PLAYED)
        for left in reversed(range(played)):
            if not left and whole > played:
                yield from self._jump(whole - played)
            yield from self._played_step()
        if until > self._at and not self._done:  # amid a step: before its last task
            yield from self._play(self._staged, math.floor(until) + 1, last=False)
        self._at = until

    def _jump(self, steps: int) -> Iterator[float | ReplayProtocol]:
        """Skip `steps` steps that are like the steady one."""
        assert self._steady is not None and self._staged is not None
        waits = self._steady.seconds - self._steady.computed[self.rank]
        share = min(self._steady.for_stages[self.rank] / waits, 1.0) if waits > 0 else 0.0
        first = math.floor(self._at) + 1
        for step in range(first, first + steps):
            self._wait(step, waits, waits * share)
        self._at = float(first - 1 + steps)
        yield steps * self._steady.seconds

    def _played_step(self) -> Iterator[float | ReplayProtocol]:
        assert self._staged is not None
        step = math.floor(self._at) + 1
        yield from self._play(self._staged, step, last=True)
        self._at, self._done = float(step), 0

    def _play(self, staged: StagedSteps, step: int, last: bool) -> Iterator[float | ReplayProtocol]:
        """The remaining tasks of a step: with its end, or without the last task."""
        tasks, wire = staged.tasks(self.rank, step), self._wire
        self._moment, self._for_stages = step, True
        for task in tasks[self._done : len(tasks) if last else -1]:
            if task.begins is not None:
                source, message = task.begins
                yield ReplayProtocol(iter([[wire.recv(self.rank, source, (step, message))]]))
            yield task.share * self._step_seconds
            if task.ends is not None:
                target, message = task.ends
                self._sends.append(wire.send(self.rank, target, task.nbytes, (step, message), "pipeline"))
            if task.rest:
                yield task.rest * self._step_seconds
            self._done += 1
        if not last:
            return
        yield ReplayProtocol(iter([self._sends]))
        self._sends = []
        peers_and_pattern = staged.peers(self.rank)
        if peers_and_pattern is not None:
            peers, pattern = peers_and_pattern
            self._for_stages, self._norm_key = False, (peers, step)
            wire.norms[self._norm_key] = wire.timeline.now
            member = ReplayMember(wire, peers, peers.index(self.rank), ("norm", step), "inner")
            yield ReplayProtocol(play(pattern, member))

    def _start(self, number: int, exchange: PlannedExchange) -> None:
        group = next((group for group in exchange.groups if self.rank in group), ())
        if exchange.what == "norm":
            self._wire.norms[number] = self._wire.timeline.now
        if len(group) > 1:
            member = ReplayMember(self._wire, group, group.index(self.rank), number, exchange.channel)
            self._flying[number] = ReplayProtocol(play(exchange.pattern(len(group)), member))

    def _wake(self) -> None:
        self._wire.timeline.at(self._wire.timeline.now, LAST, self.rank, self.advance)


MESSAGES = 100_000
"""The most messages of a replay, which then takes two or three seconds."""
_ROUNDS = 3  # the fewest rounds to replay of a long run
_FACTOR = 4  # so many times MESSAGES may be exceeded by the fewest rounds
_SETTLING, _SETTLED = 3, 6  # steps until all are alike, and alike steps to average

ExchangeRecords = Callable[[int], Sequence[PlannedExchange]]
"""The exchanges of a run of so many inner steps, in the order of their starts."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The seconds of a replay. computed[r]: of each inner step at worker r. waited[r][t]: at worker r in and after
    inner step t = 1, 2, ...; the last entry is the end of the run. waited[r][0], before the first step, does not count.
    for_stages: the part of `waited` that is for messages of other stages.
    """

    steps: int
    computed: tuple[float, ...]
    waited: tuple[tuple[float, ...], ...]
    for_stages: tuple[tuple[float, ...], ...]

    def account_of(self, first: int, last: int | None) -> TimeAccount:
        """Waiting after the steps `first` to `last` (None: and at the end), mean over the workers, without
        computing.
        """
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
        return replace(self.account_of(1, None), computing=self.steps * self.step_seconds)


@dataclass(frozen=True, slots=True)
class TimeAccount:
    """Seconds of a worker, on average. for_stages: the part of `waiting` that is for messages of other stages."""

    computing: float
    waiting: float
    for_stages: float = 0.0

    def plus(self, times: float, other: TimeAccount) -> TimeAccount:
        """The sum of this account and `times` times another."""
        return TimeAccount(
            self.computing + times * other.computing,
            self.waiting + times * other.waiting,
            self.for_stages + times * other.for_stages,
        )

    @property
    def share(self) -> float:
        """Share of the time spent computing; 1 if there is no time at all."""
        total = self.computing + self.waiting
        return self.computing / total if total else 1.0


@dataclass(frozen=True, slots=True)
class RunReplay:
    """Replays runs over the links of `topology`.

    step_seconds: of each worker; if it is `staged`, of a whole replica's step. opening: exchanges before the first
    step, one after the other; they are not counted, but set the workers' starts and number the messages. seed: of the
    jitter. messages: to replay per run, about.
    """

    topology: Topology
    step_seconds: Sequence[float]
    opening: Sequence[PlannedExchange] = ()
    seed: int = 0
    staged: StagedSteps | None = None
    messages: int = MESSAGES

    def waits(self, exchanges: Sequence[PlannedExchange], steps: int, steady: SteadyStep | None = None) -> Waits:
        """Waits in `steps` inner steps. steady: stands for most steps of each row without an exchange."""
        wire = ReplayWire(self.topology, self.seed)
        agenda = Agenda(self.opening, exchanges)
        workers = [
            ReplayWorker(wire, rank, agenda.acts(steps), each, self.staged, steady)
            for rank, each in enumerate(self.step_seconds)
        ]
        for worker in workers:
            wire.timeline.at(0.0, LAST, worker.rank, worker.advance)
        wire.timeline.run()
        waited, for_stages = (
            tuple(tuple(row[moment] for moment in range(steps + 2)) for row in rows)
            for rows in ([worker.waited for worker in workers], [worker.waited_for_stages for worker in workers])
        )
        shares = (1.0,) * len(workers) if self.staged is None else self.staged.computed
        computed = tuple(share * each for share, each in zip(shares, self.step_seconds, strict=True))
        return Waits(steps, computed, waited, for_stages)

    def run(self, records: ExchangeRecords, rhythm: Rhythm, steps: int) -> TimeAccount | None:
        """The account of a run of `steps` inner steps, replayed in part if it has more than `messages`. None if even a
        few rounds have far more.
        """
        every = rhythm.every
        rounds = max(steps - rhythm.start, 0) // every
        remainder = steps - rounds * every
        result = self._some(records, every, remainder, rounds)
        if result is None:
            return None
        waits, played = result
        account = replace(waits.account, computing=steps * waits.step_seconds)
        if played == rounds:
            return account
        return account.plus(rounds - played, _later_half(waits, remainder, every, played))

    def long_run(self, records: ExchangeRecords, rhythm: Rhythm, rounds: int = 20) -> TimeAccount | None:
        """The account of one round in the long run: the later half of `rounds`, or fewer. None: see `run`."""
        start, every = rhythm

        def later(steps: int) -> list[PlannedExchange]:
            shifted = (
                each._replace(sent=each.sent - start, lands=each.lands - start) for each in records(start + steps)
            )
            return [each for each in shifted if each.sent > 0]

        result = self._some(later, every, 0, rounds)
        if result is None:
            return None
        waits, played = result
        return replace(_later_half(waits, 0, every, played), computing=every * waits.step_seconds)

    def _some(self, records: ExchangeRecords, every: int, remainder: int, rounds: int) -> tuple[Waits, int] | None:
        """Waits of `remainder` steps, then of some of the `rounds` of `every` steps; their number. None: see `run`."""
        steady, messages = self._steady(every), self.messages
        if rounds <= _ROUNDS:
            fixed, each = 0, sum(exchange.messages for exchange in records(remainder + rounds * every)) / max(rounds, 1)
        else:
            first, third = (sum(one.messages for one in records(remainder + count * every)) for count in (1, 3))
            each = (third - first) / 2
            fixed = first - each
        if self.staged is not None:
            each += self.staged.messages * (every if steady is None else min(every, PLAYED))
        if fixed + min(rounds, _ROUNDS) * each > _FACTOR * messages:
            return None
        played = min(rounds, max(_ROUNDS, int((messages - fixed) / each)) if each > 0 else _ROUNDS)
        taken = remainder + played * every
        return self.waits(records(taken), taken, steady), played

    def _steady(self, every: int) -> SteadyStep | None:
        """A step without an exchange: the mean over a few steps and all workers. None if a few rounds of `every` steps
        have few enough messages to replay them all.
        """
        staged = self.staged
        if staged is None or every <= PLAYED or _ROUNDS * every * staged.messages <= self.messages:
            return None
        waits = replace(self, opening=()).waits((), _SETTLED)
        settled = _SETTLED - _SETTLING
        whole = [sum(row[_SETTLING + 1 : _SETTLED + 1]) / settled for row in waits.waited]
        for_stages = tuple(sum(row[_SETTLING + 1 : _SETTLED + 1]) / settled for row in waits.for_stages)
        each = [computed + waited for computed, waited in zip(waits.computed, whole, strict=True)]
        return SteadyStep(max(sum(each) / len(each), *waits.computed), waits.computed, for_stages)


def _later_half(waits: Waits, start: int, every: int, rounds: int) -> TimeAccount:
    """Mean waiting of a later round. The last one is left out: what is due in it may wait for the end of the run."""
    first, last = rounds // 2, rounds - 1
    whole = waits.account_of(start + first * every + 1, start + last * every)
    return TimeAccount(0.0, 0.0).plus(1 / (last - first), whole)
