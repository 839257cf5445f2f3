"""The exchanges of the library's methods from closed forms: what their `schedule` makes of a real model, without one.

A test holds moments, groups and kinds of patterns equal to the library's, and bytes to half a percent from 2 million
parameters on. Large models are cut more coarsely than there where a round would have more messages than the job plays:
segments of a mean; and ddp's buckets, which grow from both ends of the backward pass towards its middle.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from isles.network.planner.forms import PlannedForm
from isles.network.planner.job import Job
from isles.network.planner.memory import MOST_SEGMENTS, SEGMENT
from isles.network.planner.planned import (
    BySize,
    Cross,
    Groups,
    Mean,
    MessagePattern,
    PlannedExchange,
    Ragged,
    Rhythm,
    Segment,
    Swap,
    Then,
    Tree,
    by_size,
    gathered,
)
from isles.network.planner.rounds import Rounds

OVERLAP = 1
"""Steps; the streaming methods' overlap_steps."""
_HEADER, _LENGTH = 32, 8  # bytes beside a mean, and of the length of what is ragged
_FORWARD = 1 / 3
_BUCKET = 25 * 2**18  # entries of 4 bytes; ddp's bucket_megabytes = 25
_FEW_BUCKETS = 32
_ROUNDS_OF_PAIRS = 4  # for one of all workers: who waits for whom changes from round to round
_LAYERS = 3  # of a fragment, or half of a shorter model's: the streaming methods' defaults

Pairs = Callable[[int], Groups]
"""The pairs of a round."""


@dataclass(frozen=True, slots=True)
class Course:
    """One way's exchanges. rhythm: how they repeat themselves. planned: those of a run of so many inner steps."""

    rhythm: Rhythm
    planned: Callable[[int], list[PlannedExchange]]


Closed = Callable[[Job, PlannedForm, int, Pairs | None], Course]
"""Of a job, the form of what is sent, H, and the pairs of a round where there are some; None: every round is taken
for a usual one, in which the first two are a pair.
"""


def gradients(job: Job, form: PlannedForm, every: int, pairs: Pairs | None) -> Course:
    """ddp, dct-dp: bucket by bucket behind the backward pass."""
    groups, taken = _everyone(job), buckets(job)
    alone, sizes = max(_coarse(job), SEGMENT / (job.workers - 1)), [sum(ones) for ones in taken]
    patterns = [  # those that are taken for one go side by side: together as many segments as one of them has
        by_size(groups, partial(_gradient, form, entries, coarse=len(ones) * alone))
        for ones, entries in zip(taken, sizes, strict=True)
    ]
    left = [(1 - _FORWARD) * sum(sizes[place + 1 :]) / sum(sizes) for place in range(len(sizes))]

    def planned(steps: int) -> list[PlannedExchange]:
        return [
            PlannedExchange(step - behind, step, index, "gradient", groups, pattern, step)
            for step in range(1, steps + 1)
            for index, (behind, pattern) in enumerate(zip(left, patterns, strict=True))
        ]

    return Course(Rhythm(0, 1), planned)


def momentum(job: Job, form: PlannedForm, every: int, pairs: Pairs | None) -> Course:
    """demo: everyone's to everyone after each step."""
    groups = _everyone(job)
    pattern = by_size(groups, lambda size: gathered(form.bits * job.parameters / 8, size))
    return Course(
        Rhythm(0, 1),
        lambda steps: [PlannedExchange(at, at, 0, "momentum", groups, pattern, at) for at in range(1, steps + 1)],
    )


def units(job: Job, form: PlannedForm, every: int, pairs: Pairs | None) -> Course:
    """ist, sampler = "rolling": in round r worker i holds the units from its own r-th on."""
    groups, size, coarse = _everyone(job), job.workers, _coarse(job)
    wide = max(round(job.known_matrices[3][1]), size)
    kept, unit = wide // size, 3 * 4 * job.parameters * job.mlp_share / wide
    rest = by_size(groups, lambda n: _mean((1 - job.mlp_share) * job.parameters, 32, 1.0, n, coarse))

    def held(round: int) -> tuple[tuple[float, ...], ...]:
        full, part = divmod(round % wide, kept)
        rows = [[0.0] * size for _ in range(size)]
        for holder in range(size):
            for keeper, count in ((holder + full, kept - part), (holder + full + 1, part)):
                if keeper % size != holder:
                    rows[holder][keeper % size] += count * unit
        return tuple(map(tuple, rows))

    usual = Swap((kept * unit / size,) * size)

    def moves(round: int, back: int) -> MessagePattern:
        return Cross(tuple(zip(*held(round), strict=True)) if back else held(round))

    def planned(steps: int) -> list[PlannedExchange]:
        made = []
        for round, at in enumerate([*range(every, steps + 1, every), *([steps + 1] if steps % every else [])]):
            for place, what in enumerate(("merge", "divide")):
                moved = by_size(
                    groups, lambda n, now=round + place, back=place: usual if pairs is None else moves(now, back)
                )
                made.append(PlannedExchange(at, at, 2 * place, what, groups, moved, 2 * round + place))
            made.insert(-1, PlannedExchange(at, at, 1, "average", groups, rest, 2 * round))
        return made

    return Course(Rhythm(0, every), planned)


def rounds(
    job: Job, form: PlannedForm, every: int, pairs: Pairs | None, *, late: bool = False, streams: bool = False
) -> Course:
    """diloco, sparseloco, sparta; late: eager, dilocox; streams: streaming-diloco."""
    return _in_rounds(job, form, every, lambda round: _everyone(job), late=late, streams=streams, anchors=False)


def swaps(
    job: Job, form: PlannedForm, every: int, pairs: Pairs | None, *, streams: bool = False, anchors: bool = True
) -> Course:
    """noloco, streaming-noloco; anchors travel in the form of the payload, behind each landing."""
    return _in_rounds(
        job, form, every, pairs or (lambda round: ((0, 1),)), late=False, streams=streams, anchors=anchors
    )


def _in_rounds(
    job: Job, form: PlannedForm, every: int, groups: Pairs, *, late: bool, streams: bool, anchors: bool
) -> Course:
    sizes = fragments(job) if streams else [job.parameters]
    coarse = _coarse(job) * (1 if groups(1) == _everyone(job) else _ROUNDS_OF_PAIRS)
    offsets = [round(index * every / len(sizes)) for index in range(len(sizes))]

    def pattern(index: int, what: str, round: int, groups: Groups) -> BySize:
        now = form.first if form.first is not None and round <= form.dense else form
        return _sized(now, sizes[index], tuple(sorted({len(group) for group in groups})), coarse)

    made = Rounds(
        fragments=len(sizes),
        sends=lambda step: [
            index for index, offset in enumerate(offsets) if step >= every and (step - offset) % every == 0
        ],
        lands=lambda sent: sent + (OVERLAP if streams else 0) + (every if late else 0),
        groups=groups,
        pattern=pattern,
        anchors="ahead" if anchors else "none",
    )
    return Course(Rhythm(form.dense * every, every), made.planned)


def opening(job: Job) -> list[PlannedExchange]:
    """A hash from everyone to everyone, worker 0's weights, and another hash."""
    groups, tree = _everyone(job), Tree(4 * job.parameters)
    patterns = [gathered(8, job.workers), tree, gathered(8, job.workers)]
    return [
        PlannedExchange(0, 0, 0, "opening", groups, by_size(groups, lambda _, one=one: one), flight, "control")
        for flight, one in enumerate(patterns)
    ]


@lru_cache(maxsize=256)
def random_pairs(workers: int, round: int, seed: int = 0) -> Groups:
    """Those of `isles.replicas.parts.mixing.RandomGroups`."""
    order = list(range(workers))
    random.Random(f"isles groups {seed} {round}").shuffle(order)
    count = workers // 2
    paired = [tuple(sorted(order[place : 2 * count : count])) for place in range(count)]
    return tuple(sorted([*paired, *((rank,) for rank in order[2 * count :])]))


def _everyone(job: Job) -> Groups:
    return (tuple(range(job.workers)),)


def buckets(job: Job) -> list[list[float]]:
    """Entries of each, in the order of the backward pass: whole tensors, a large one by itself; the embedding is last.
    Of many, some are taken for one.
    """
    blocks, others = job.known_matrices[:4], job.known_matrices[4:]
    block = [rows * columns for rows, columns, count in blocks for _ in range(round(count / job.layers))]
    ends = [rows * columns for rows, columns, count in others for _ in range(round(count))]
    tensors, made = [*ends[1:], *block[::-1] * job.layers, *ends[:1]], [0.0]
    tensors[-1] += max(job.parameters - sum(tensors), 0.0)
    for entries in tensors:
        if made[-1] and made[-1] + entries > _BUCKET:
            made.append(0.0)
        made[-1] += entries
    if len(made) <= _FEW_BUCKETS:
        return [[entries] for entries in made]
    front, back = list[list[float]](), list[list[float]]()
    while made:
        each = min(2 ** (len(front) // 2), (len(made) + 1) // 2)
        front, back, made = [*front, made[:each]], [made[each:][-each:], *back], made[each:][:-each]
    return [ones for ones in (*front, *back) if ones]


def parallel_bytes(parameters: int, workers: int, steps: int) -> float:
    """Bytes that each sends, on average, where gradients are averaged as they are, in one piece a step: to the bit."""
    return steps * (2 * (workers - 1) * 4 * parameters + workers * (workers - 1) * _HEADER) / workers


def _gradient(form: PlannedForm, entries: float, size: int, coarse: float) -> MessagePattern:
    if math.isinf(form.back):
        return Ragged(form.bits * entries / 8, _HEADER + _LENGTH)
    return _means(form, entries, size, coarse)


@lru_cache(maxsize=1024)
def _sized(form: PlannedForm, entries: float, sizes: Sequence[int], coarse: float) -> BySize:
    return BySize(tuple((size, _means(form, entries, size, coarse)) for size in sizes if size > 1))


def _means(form: PlannedForm, entries: float, size: int, coarse: float) -> MessagePattern:
    shares = form.entries or (1.0,) * (len(form.phases) + 1)  # of the entries, those that travel in each phase
    made = [
        _mean(share * entries, bits / share if share else 0.0, form.back, size, coarse)
        for share, bits in zip(shares, (*form.phases, form.beside), strict=False)
    ]
    if len(form.phases) == 1:
        return made[0]
    return Then((made[0], *(made[2:] if form.beside else ())), made[1])


def _mean(entries: float, bits: float, back: float, size: int, coarse: float) -> Mean:
    """entries: of the buffer. bits: of an entry that is sent."""
    played = entries / ((size - 1) * coarse)
    count = min(math.ceil(min(entries / SEGMENT, played)) or 1, MOST_SEGMENTS)
    nbytes = entries / count * bits / 8
    gathers = size <= 1 + back
    there = None if gathers else (nbytes / size,) * size
    return Mean((Segment(there, (nbytes if gathers else nbytes * back / size,) * size),) * count, _HEADER)


def _coarse(job: Job) -> float:
    """Entries of a segment, for each other member of a group, where a round of the whole model has as many messages as
    the job plays: one to each of them there, and one back. Of more than four workers fewer are played, for time.
    """
    return job.workers * max(job.workers, 4) * job.parameters / (2 * job.messages)


def fragments(job: Job) -> list[float]:
    """Entries of each: of the blocks, strided, and one of the rest."""
    layers = min(_LAYERS, -(-job.layers // 2))
    count = -(-job.layers // layers)
    block = sum(rows * columns * number for rows, columns, number in job.known_matrices[:4]) / job.layers
    sizes = [block * len(range(place, job.layers, count)) for place in range(count)]
    return [*sizes, max(job.parameters - sum(sizes), 0.0)]
