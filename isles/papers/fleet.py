"""A fleet of workers that train and exchange, event by event: random step times, random message times, pauses. No model
is trained: only clocks move, so 100,000 workers are not too many.

    COMPUTED   a worker has taken its steps of a round: what it sends leaves
    ARRIVED    a message is there: its partner's (pairs), its own at the averaging node, or the mean from there (all)

A worker goes on to its next round when it has computed and its message has arrived; if it is paused then, when it is
back. pairs: NoLoCo's, new ones each round, an odd one alone. all: a mean over everybody, in two messages one after
another as `isles.comm.collectives.mean` takes it: known when the last worker's has arrived, and then sent to all.

Events are taken one by one from a queue in the order of (time, kind, worker). Every number is drawn from (seed, round),
each worker's pauses from (seed, worker): nothing depends on the order of events.

`isles plan explain noloco-fleet` shows fleets of up to 1,024 workers with pauses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from isles.base.errors import demand
from isles.network.engine import EventQueue
from isles.network.pauses import Absences, Pauses
from isles.papers.noloco import StepLaw
from isles.report.panels import Table
from isles.report.sheet import Sheet

COMPUTED, ARRIVED = range(2)
_AT_HAND = 32  # rounds whose numbers are not drawn again

FleetEvent = tuple[float, int, int, int]
"""(seconds, kind, worker, round)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """steps: law of a worker's steps between two exchanges. message: mean seconds of one message; message_variance: of
    the logarithm of its log-normal factor.
    """

    workers: int
    steps: StepLaw
    message: float = 0.0
    message_variance: float = 0.0
    pauses: Pauses | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        demand(self, "workers", lambda x: x >= 1, "choose 1 or more")
        demand(self, "message", lambda x: 0 <= x < math.inf, "choose 0 or more seconds")
        demand(self, "message_variance", lambda x: 0 <= x <= 9, "choose 0 to 9")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """clocks: when each worker had ended its last round, seconds. events: how many were taken from the queue."""

    clocks: tuple[float, ...]
    events: int

    @property
    def seconds(self) -> float:
        """Until the last one is through."""
        return max(self.clocks)


def run(fleet: Fleet, mixing: Literal["pairs", "all"], rounds: int, log: list[FleetEvent] | None = None) -> Outcome:
    """`rounds` rounds of everybody. log: gets every event, in order."""
    if rounds < 1:
        raise ValueError(f"rounds = {rounds}: choose 1 or more")
    drawn, pairs = _Rounds(fleet, mixing == "pairs"), mixing == "pairs"
    everybody = range(fleet.workers)
    away = [None if fleet.pauses is None else fleet.pauses.of(worker, fleet.seed) for worker in everybody]
    # When each worker leaves next: as long as that is ahead, its pauses need not be looked at.
    leaves = [math.inf if one is None else one.next(0.0) for one in away]
    clocks = [0.0] * fleet.workers
    waiting, early = [-1] * fleet.workers, set[tuple[int, int]]()  # for the message of which round; what came too soon
    timeline, events, landed = EventQueue(), 0, 0

    def begin(worker: int, number: int, time: float) -> None:
        """Start round `number` at `time`, or when the worker is back."""
        if time >= leaves[worker]:
            time, leaves[worker] = _later(away[worker], time, 0.0)
        if number == rounds:
            clocks[worker] = time
            return
        end = time + drawn.seconds(number)[worker]
        if end > leaves[worker]:
            end, leaves[worker] = _later(away[worker], time, end - time)
        timeline.at(end, COMPUTED, worker, computed, worker, number)

    def count(kind: int, worker: int, number: int) -> float:
        nonlocal events
        events += 1
        if log is not None:
            log.append((timeline.now, kind, worker, number))
        return timeline.now

    def computed(worker: int, number: int) -> None:
        time = count(COMPUTED, worker, number)
        taken, partners = drawn.messages(number)
        partner = partners[worker] if pairs else fleet.workers
        if partner == worker:
            begin(worker, number + 1, time)
            return
        timeline.at(time + taken[worker], ARRIVED, partner, arrived if pairs else at_the_mean, partner, number)
        if (worker, number) in early:
            early.remove((worker, number))
            begin(worker, number + 1, time)
        else:
            waiting[worker] = number

    def at_the_mean(worker: int, number: int) -> None:
        nonlocal landed
        time = count(ARRIVED, worker, number)
        landed += 1
        if landed == fleet.workers:
            landed = 0
            for one, taken in enumerate(drawn.arrivals(number)):
                timeline.at(time + taken, ARRIVED, one, arrived, one, number)

    def arrived(worker: int, number: int) -> None:
        time = count(ARRIVED, worker, number)
        if waiting[worker] == number:
            waiting[worker] = -1
            begin(worker, number + 1, time)
        else:
            early.add((worker, number))

    for worker in everybody:
        begin(worker, 0, 0.0)
    timeline.run()
    return Outcome(clocks=tuple(clocks), events=events)


def _later(away: Absences | None, time: float, seconds: float) -> tuple[float, float]:
    """When `seconds` of being up, begun at `time`, are over, and when the worker leaves after that."""
    assert away is not None, "who never pauses never leaves"
    end = away.after(time, seconds)
    return end, away.next(end)


class _Rounds:
    """What is drawn for each round; it is drawn again for a worker that is many rounds behind."""

    def __init__(self, fleet: Fleet, pairs: bool) -> None:
        self._fleet, self._pairs = fleet, pairs
        self.seconds, self.messages = lru_cache(_AT_HAND)(self._seconds), lru_cache(_AT_HAND)(self._messages)

    def _seconds(self, number: int) -> list[float]:
        """Of everybody's steps in a round."""
        return self._fleet.steps.sampler(self._random(number, 0)).draw(self._fleet.workers).tolist()

    def _messages(self, number: int) -> tuple[list[float], list[int]]:
        """(seconds of everybody's message, everybody's partner) in a round."""
        random = self._random(number, 1)
        partners = np.arange(self._fleet.workers)
        if self._pairs:
            order = random.permutation(self._fleet.workers)
            one, other = order[0 : 2 * (self._fleet.workers // 2) : 2], order[1::2]
            partners[one], partners[other] = other, one
        return self._of_messages(random), partners.tolist()

    def arrivals(self, number: int) -> list[float]:
        """Seconds of the mean's way to everybody; asked for once."""
        return self._of_messages(self._random(number, 2))

    def _random(self, number: int, what: int) -> np.random.Generator:
        return np.random.default_rng([self._fleet.seed, number, what])

    def _of_messages(self, random: np.random.Generator) -> list[float]:
        s = math.sqrt(self._fleet.message_variance)
        z = random.standard_normal(self._fleet.workers)
        return (self._fleet.message * np.exp(s * z - s * s / 2)).tolist()


_WORKERS, _ROUNDS, _STEPS = (16, 64, 256, 1024), 20, 50
_PAUSES = {"none": None, "every 20,000 s, 600 s": Pauses(every=20_000, seconds=600)}


def fleet() -> Sheet:
    """Seconds a round of pairs and of a mean over everybody, and how many times longer the mean takes."""
    rows, data = [], []
    for words, pauses in _PAUSES.items():
        for workers in _WORKERS:
            one = Fleet(workers=workers, steps=StepLaw(count=_STEPS), message=10.0, message_variance=0.5, pauses=pauses)
            pairs, everybody = (run(one, mixing, _ROUNDS).seconds / _ROUNDS for mixing in ("pairs", "all"))
            rows.append([str(workers), words, f"{pairs:.1f}", f"{everybody:.1f}", f"{everybody / pairs:.2f}"])
            data.append({"workers": workers, "pauses": words, "pairs_seconds": pairs, "all_seconds": everybody})
    return Sheet(
        name="noloco-fleet",
        title="Pairs against a mean over everybody, event by event",
        subtitle="Random step and message times, after section 5 of arXiv 2506.10911, and pauses; only clocks move",
        table=Table(
            heads=["workers", "pauses", "pairs, s a round", "all, s a round", "all / pairs"], rows=rows, names=2
        ),
        what=f"{_ROUNDS} rounds of {_STEPS} steps; messages of 10 s on average, log-normal with variance 0.5",
        data={"rounds": _ROUNDS, "steps": _STEPS, "rows": data},
        notes=("One draw of each (seed 0): a few percent of noise. Larger fleets: docs/simulating.md.",),
    )
