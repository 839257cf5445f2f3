"""Which method for which link: seconds, bytes and memory of this library's methods, from the time of a step and the
lines between the workers.

    job, WAYS (`ways`) -> exchanges (`closed`) -> seconds waited a round, for each H -> utilisation = Hc / (Hc + waits)
                       -> bytes (`forms`), memory                                    -> Plan, in the order to try them

H and wanted rates are searched exchange by exchange (`turns`); what is shown of up to 16 workers is replayed message by
message (`replay`): the run, where its tokens are given, else the long run.

Left out: headers in bytes, the time to encode, workers of unequal speed. Memory: weights, gradients, AdamW (16 bytes a
parameter, float32; demo brings its own optimizer) and what the method keeps, as a dry run says it
(`isles.network.planner.memory`). With ist (here MLPs are divided) computing and the 16 bytes are of a worker's part.

Rank: a plan that reaches the wanted utilisation comes before one that does not; then what changes training less:
gradients every step (ddp); answers of the same round; answers a round late (eager, dilocox) or of a part of the entries
(sparseloco, sparta, demo, dct-dp, low-rank ddp); a part of the model a worker (ist); then the smaller H; then the order
of `WAYS`. That is a judgement from the papers' losses, not a measurement of yours. Of those that do not reach it, the
one that computes most of the time is first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from isles.network.links import Links
from isles.network.planner.closed import opening, random_pairs
from isles.network.planner.costs import Lines
from isles.network.planner.forms import form_of
from isles.network.planner.job import Job
from isles.network.planner.memory import WorkerMemory
from isles.network.planner.replay import TimeAccount, long_run, replay_run
from isles.network.planner.turns import TURNS, Turns
from isles.network.planner.ways import WAYS, Way
from isles.network.topology import Topology

EVERY = (10, 20, 30, 50, 100, 200, 300, 500)
"""Rounds that are tried, in inner steps."""
MOST_REPLAYED = 16
"""Workers."""
_MESSAGES = 6_000  # that are played of a plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way at one H. waits: seconds a round, a mean over the workers. about: they are those of the search, for there
    are too many messages to replay. bytes_a_step: that a worker sends, on average. wanted: how many times
    the present rates it wants for each target; nan: no rate is enough. memory: a worker's. hours: None where no
    tokens are given.
    """

    way: Way
    every: int
    waits: float
    utilisation: float
    reaches: bool
    wanted: tuple[float, ...]
    bytes_a_step: float
    memory: WorkerMemory
    hours: float | None
    about: bool


def plan(
    job: Job, *, targets: Sequence[float] = (0.9,), every: int | None = None, ways: Sequence[Way] = WAYS
) -> list[Plan]:
    """The ways that take H, the first the one to try first. targets: utilisations for which rates are asked; the first
    of them is the one to reach. every: H for all; None: for each way the smallest of `EVERY` that reaches it, or the
    largest.
    """
    if not targets or not all(0 < target < 1 for target in targets):
        raise ValueError(f"targets = {list(targets)}: choose shares between 0 and 1, such as 0.9")
    if every is not None and every < 1:
        raise ValueError(f"sync_every = {every}: choose 1 or more")
    lines = _lines(job.links, job.workers)
    made = [
        _first_enough(job, lines, way, targets, [every] if every else list(EVERY))
        for way in ways
        if every is None or way.every or way.least <= every
    ]
    order = {way: place for place, way in enumerate(WAYS)}
    return sorted(
        made,
        key=lambda one: (
            (0, one.way.kind, one.every, order[one.way]) if one.reaches else (1, -one.utilisation, 0, order[one.way])
        ),
    )


def utilisation(job: Job, way: Way, every: int, lines: Lines) -> float:
    """Share of the time spent computing, exchange by exchange, in the long run."""
    return _share(job, way, every, lines, _usual(job, way, every))


def curve(job: Job, one: Plan, factors: Sequence[float]) -> list[float]:
    """`utilisation` of the plan with every rate multiplied by each factor."""
    lines, usual = _lines(job.links, job.workers), _usual(job, one.way, one.every)
    return [_share(job, one.way, one.every, lines.scaled(factor), usual) for factor in factors]


def replayed(job: Job, way: Way, every: int, messages: int = _MESSAGES) -> TimeAccount | None:
    """Of one round, on average over the run where tokens are given, else in the long run; message by message. None
    where there are too many.
    """
    if job.workers > MOST_REPLAYED:
        return None
    course = way.exchanges(job, form_of(way.codec, job), every, lambda round: random_pairs(job.workers, round))
    topology, each = Topology(job.workers, job.links), [job.step_seconds * way.holds(job)] * job.workers
    if job.steps is None:
        return long_run(course.planned, course.rhythm, topology, each, opening(job), messages=messages)
    whole = replay_run(course.planned, course.rhythm, topology, each, job.steps, opening(job), messages=messages)
    if whole is None:
        return None
    rounds = job.steps / every
    return TimeAccount(whole.computing / rounds, whole.waiting / rounds)


@lru_cache(maxsize=256)
def _usual(job: Job, way: Way, every: int) -> Turns:
    planned = way.exchanges(job, form_of(way.codec, job), every, None).planned(TURNS * every)
    return Turns(planned, every, job.workers)


def _share(job: Job, way: Way, every: int, lines: Lines, usual: Turns) -> float:
    seconds = job.step_seconds * way.holds(job)
    return TimeAccount(every * seconds, usual.waiting(lines, seconds)).share


@lru_cache(maxsize=1)
def _lines(links: Links, workers: int) -> Lines:
    """Kept, for a matrix of thousands of workers takes seconds."""
    return Lines.of(links, range(workers))


def _first_enough(job: Job, lines: Lines, way: Way, targets: Sequence[float], tried: list[int]) -> Plan:
    tried = [way.every] if way.every else tried
    every = next((every for every in tried if utilisation(job, way, every, lines) >= targets[0]), tried[-1])
    account = replayed(job, way, every)
    for larger in tried[
        tried.index(every) + 1 :
    ]:  # jitter, or the end of the run, may ask for more than the search knew
        if account is None or account.share >= targets[0]:
            break
        every, account = larger, replayed(job, way, larger)
    about, computing = account is None, every * job.step_seconds * way.holds(job)
    if account is None:
        account = TimeAccount(computing, computing * (1 / utilisation(job, way, every, lines) - 1))
    form, hours = form_of(way.codec, job), None
    if job.tokens is not None and job.step_tokens is not None:
        hours = job.tokens / job.step_tokens / every * (account.computing + account.waiting) / 3600
    return Plan(
        way=way,
        every=every,
        waits=account.waiting,
        utilisation=account.share,
        reaches=account.share >= targets[0],
        wanted=tuple(_wanted(job, way, every, lines, targets)),
        bytes_a_step=way.payloads(job.workers, form) * form.bits / 8 * job.parameters / every,
        memory=way.memory(job),
        hours=hours,
        about=about,
    )


def _wanted(job: Job, way: Way, every: int, lines: Lines, targets: Sequence[float]) -> Iterator[float]:
    """The factor on all rates at which each target is just reached, by bisection to 0.01 %."""
    usual = _usual(job, way, every)

    def share(power: float) -> float:
        return _share(job, way, every, lines.scaled(math.exp(power)), usual)

    for target in targets:
        low, high = math.log(1e-9), math.log(1e9)
        if share(high) < target:
            yield math.nan
            continue
        while high - low > 1e-4:
            middle = (low + high) / 2
            low, high = (low, middle) if share(middle) >= target else (middle, high)
        yield math.exp(high)
