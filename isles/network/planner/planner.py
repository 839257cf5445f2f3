"""Which method for which link: seconds, bytes and memory of this library's methods, from the time of a step and the
lines between the workers.

    job, WAYS (`ways`) -> seconds waited a round, for each H   -> utilisation = Hc / (Hc + waits), c: seconds of a step
                       -> bytes (`forms`), memory              -> Plan, in the order in which to try them

Left out: jitter, headers, the time to encode, workers of unequal speed. Memory: weights, gradients, AdamW (16 bytes a
parameter, float32) and the vectors that the method keeps while a round is under way. With ist (here MLPs are divided)
computing and the 16 bytes are of a worker's part.

Rank: a plan that reaches the wanted utilisation comes before one that does not; then what changes training less:
gradients every step (ddp); answers of the same round; answers a round late (eager, dilocox) or of a part of the entries
(sparseloco, sparta, demo, dct-dp, low-rank ddp); a part of the model a worker (ist); then the smaller H; then the order
of `WAYS`. That is a judgement from the papers' losses, not a measurement of yours. Of those that do not reach it, the
one that computes most of the time is first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from isles.network.links import Links
from isles.network.planner.costs import Lines
from isles.network.planner.forms import form_of
from isles.network.planner.job import Job
from isles.network.planner.ways import WAYS, Way

EVERY = (10, 20, 30, 50, 100, 200, 300, 500)
"""Rounds that are tried, in inner steps."""
_ADAMW = 16  # bytes a parameter: float32 weights, gradients, two moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way at one H. waits: seconds a round. bytes_a_step: that a worker sends, on average. wanted: how many times
    the present rates it wants for each target; nan: no rate is enough. memory: bytes a worker. hours: None where no
    tokens are given.
    """

    way: Way
    every: int
    waits: float
    utilisation: float
    reaches: bool
    wanted: tuple[float, ...]
    bytes_a_step: float
    memory: float
    hours: float | None


def plan(job: Job, *, targets: Sequence[float] = (0.9,), every: int | None = None) -> list[Plan]:
    """All ways that take H, the first the one to try first. targets: utilisations for which rates are asked; the first
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
        for way in WAYS
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
    """Share of the time spent computing."""
    computing = every * job.step_seconds * way.holds(job)
    return computing / (computing + way.waits(job, lines, form_of(way.codec, job), every))


def curve(job: Job, one: Plan, factors: Sequence[float]) -> list[float]:
    """The plan's utilisation with every rate multiplied by each factor."""
    lines = _lines(job.links, job.workers)
    return [utilisation(job, one.way, one.every, lines.scaled(factor)) for factor in factors]


@lru_cache(maxsize=1)
def _lines(links: Links, workers: int) -> Lines:
    """Kept, for a matrix of thousands of workers takes seconds."""
    return Lines.of(links, range(workers))


def _first_enough(job: Job, lines: Lines, way: Way, targets: Sequence[float], tried: list[int]) -> Plan:
    tried = [way.every] if way.every else tried
    shares = {every: utilisation(job, way, every, lines) for every in tried}
    every = next((every for every in tried if shares[every] >= targets[0]), tried[-1])
    form, share = form_of(way.codec, job), shares[every]
    hours = None
    if job.tokens is not None and job.step_tokens is not None:
        hours = job.tokens / job.step_tokens * job.step_seconds * way.holds(job) / share / 3600
    return Plan(
        way=way,
        every=every,
        waits=way.waits(job, lines, form, every),
        utilisation=share,
        reaches=share >= targets[0],
        wanted=tuple(_wanted(job, way, every, lines, target) for target in targets),
        bytes_a_step=way.payloads(job.workers, form) * form.bits / 8 * job.parameters / every,
        memory=(_ADAMW * way.holds(job) + 4 * way.vectors + form.kept) * job.parameters,
        hours=hours,
    )


def _wanted(job: Job, way: Way, every: int, lines: Lines, target: float) -> float:
    """The factor on all rates at which the target is just reached, by bisection to 0.01 %."""
    low, high = math.log(1e-9), math.log(1e9)
    if utilisation(job, way, every, lines.scaled(math.exp(high))) < target:
        return math.nan
    while high - low > 1e-4:
        middle = (low + high) / 2
        enough = utilisation(job, way, every, lines.scaled(math.exp(middle))) >= target
        low, high = (low, middle) if enough else (middle, high)
    return math.exp(high)
