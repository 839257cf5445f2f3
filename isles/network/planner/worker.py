"""What a worker does in a replay: computes, starts exchanges, waits for them; of replicas in stages task by task."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from isles.network.engine import LAST
from isles.network.planner.planned import PlannedExchange
from isles.network.planner.stages import StagedSteps, SteadyStep
from isles.network.planner.wire import PlannedMember, PlannedTransfer, PlannedWaiting, PlannedWire, play

PLAYED = 4
"""Steps in a row of replicas in stages that are played, where there are too many to play each task of all."""


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

        def land(moment: int, left: Counter[int]) -> Iterator[Act]:
            """What is due, but for flights of which something is still to be sent."""
            nonlocal flying
            due = [held for held in flying if held[1].lands <= moment and not left[held[1].flight]]
            if due:
                flying = [held for held in flying if held[1].lands > moment or left[held[1].flight]]
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
            left = Counter(one.flight for _, one in todo)
            for place, (number, one) in enumerate(todo):
                if not place or todo[place - 1][1].flight != one.flight:
                    yield from land(moment, left)
                yield Act(moment, starts=(number, one))
                flying.append((number, one))
                left[one.flight] -= 1
            yield from land(moment, left)
        if at < steps:
            yield Act(steps, computes=steps - at)
        yield from land(steps + 2, Counter())


class Act(NamedTuple):
    """One of them, in the order of the fields. computes: inner steps. starts, waits_for: exchanges, by number."""

    moment: int
    computes: float = 0.0
    starts: tuple[int, PlannedExchange] | None = None
    waits_for: int | None = None


class PlannedWorker:
    """Acts an agenda out; exchanges in which it is alone take no time. steady: of a step that is not played by task."""

    def __init__(
        self,
        wire: PlannedWire,
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
        self._life = self._lives(acts)
        self._flying: dict[int, PlannedTransfer] = {}
        self._since: float | None = None
        self._moment, self._for_stages = 0, False
        self._asks: Hashable = None
        """What is waited for: after which step, whether it is a message of a stage, and which norm of the gradient."""
        self._at, self._done = 0.0, 0
        """Inner steps computed; tasks of the next one that are done."""
        self._sends: list[PlannedWaiting] = []

    def turn(self) -> None:
        """Go on, until something takes time."""
        wire = self._wire
        if self._since is not None:
            seconds = wire.timeline.now - self._since
            # A worker that asks for the norm waits for the stages that still compute, and then for the answers.
            asked = wire.norms.get(self._asks, self._since)
            self._wait(self._moment, seconds, seconds if self._for_stages else max(asked - self._since, 0.0))
            self._since = None
        for what in self._life:
            if isinstance(what, float):
                wire.timeline.at(wire.timeline.now + what, LAST, self.rank, self.turn)
                return
            if not what.done:
                self._since = wire.timeline.now
                what.on_end = self._wake
                return

    def _wait(self, moment: int, seconds: float, for_stages: float) -> None:
        self.waited[moment] += seconds
        self.waited_for_stages[moment] += for_stages

    def _lives(self, acts: Iterator[Act]) -> Iterator[float | PlannedTransfer]:
        """Seconds that it computes, and what it waits for."""
        for act in acts:
            if act.computes > 0:
                yield from self._computes(act.computes)
            if act.starts is not None:
                self._start(*act.starts)
            transfer = None if act.waits_for is None else self._flying.pop(act.waits_for, None)
            if transfer is not None:
                self._moment, self._for_stages, self._asks = act.moment, False, act.waits_for
                yield transfer

    def _computes(self, steps: float) -> Iterator[float | PlannedTransfer]:
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

    def _jump(self, steps: int) -> Iterator[float | PlannedTransfer]:
        """So many steps like the steady one."""
        assert self._steady is not None and self._staged is not None
        waits = self._steady.seconds - self._steady.computed[self.rank]
        share = min(self._steady.for_stages[self.rank] / waits, 1.0) if waits > 0 else 0.0
        first = math.floor(self._at) + 1
        for step in range(first, first + steps):
            self._wait(step, waits, waits * share)
        self._at = float(first - 1 + steps)
        yield steps * self._steady.seconds

    def _played_step(self) -> Iterator[float | PlannedTransfer]:
        assert self._staged is not None
        step = math.floor(self._at) + 1
        yield from self._play(self._staged, step, last=True)
        self._at, self._done = float(step), 0

    def _play(self, staged: StagedSteps, step: int, last: bool) -> Iterator[float | PlannedTransfer]:
        """The tasks of a step that are left, with its end or without the last one."""
        tasks, wire = staged.tasks(self.rank, step), self._wire
        self._moment, self._for_stages = step, True
        for task in tasks[self._done : len(tasks) if last else -1]:
            if task.begins is not None:
                source, message = task.begins
                yield PlannedTransfer(iter([[wire.recv(self.rank, source, (step, message))]]))
            yield task.share * self._step_seconds
            if task.ends is not None:
                target, message = task.ends
                self._sends.append(wire.send(self.rank, target, task.nbytes, (step, message), "pipeline"))
            if task.rest:
                yield task.rest * self._step_seconds
            self._done += 1
        if not last:
            return
        yield PlannedTransfer(iter([self._sends]))
        self._sends = []
        asked = staged.peers(self.rank)
        if asked is not None:
            peers, pattern = asked
            self._for_stages, self._asks = False, (peers, step)
            wire.norms[self._asks] = wire.timeline.now
            member = PlannedMember(wire, peers, peers.index(self.rank), ("norm", step), "inner")
            yield PlannedTransfer(play(pattern, member))

    def _start(self, number: int, one: PlannedExchange) -> None:
        group = next((group for group in one.groups if self.rank in group), ())
        if one.what == "norm":
            self._wire.norms[number] = self._wire.timeline.now
        if len(group) > 1:
            member = PlannedMember(self._wire, group, group.index(self.rank), number, one.channel)
            self._flying[number] = PlannedTransfer(play(one.pattern(len(group)), member))

    def _wake(self) -> None:
        self._wire.timeline.at(self._wire.timeline.now, LAST, self.rank, self.turn)
