"""The replay by hand and against `costs`, and the closed forms of exchanges against the library's own."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

from isles.network.links import Links
from isles.network.planner.closed import random_pairs
from isles.network.planner.costs import Lines, all_gather_seconds, two_shot_seconds
from isles.network.planner.forms import form_of
from isles.network.planner.planned import (
    Mean,
    MessagePattern,
    PlannedExchange,
    Rhythm,
    Ring,
    Segment,
    Swap,
    Then,
    Tree,
    by_size,
)
from isles.network.planner.planner import replayed
from isles.network.planner.replay import long_run, replay, replay_run
from isles.network.planner.ways import WAYS, Way
from isles.network.topology import Topology
from tests.network.ways import H, job_of, named, settings_of

WORKERS = 8
SLOW = Links(bandwidth=1e6, latency=0.05)


def every_round(pattern: MessagePattern, workers: int, every: int, late: int = 0, sent: float = 0.0):
    """The records of an exchange of all after every `every` steps, landing `late` steps later."""
    groups = (tuple(range(workers)),)
    made = by_size(groups, lambda size: pattern)

    def records(steps: int) -> list[PlannedExchange]:
        return [
            PlannedExchange(at - sent, min(at + late, steps + 1), 0, "payload", groups, made, at)
            for at in range(every, steps + 1, every)
        ]

    return records


@pytest.mark.parametrize(
    ("pattern", "alone"),
    [
        (Swap((1e6,) * 4), all_gather_seconds),
        (Ring(6e6), lambda lines, bits: 6 * (bits / 1e6 + 0.05)),
        (Mean((Segment((1e6,) * 4, (1e6,) * 4),), 0), lambda lines, bits: two_shot_seconds(lines, 4 * bits)),
    ],
)
def test_an_exchange_alone_takes_what_it_costs(pattern: MessagePattern, alone):
    """Megabytes on 1 Mbit/s."""
    waits = replay(every_round(pattern, 4, 10)(10), Topology(4, SLOW), [0.1] * 4, 10)
    assert waits.waiting() == pytest.approx(alone(Lines.of(SLOW, range(4)), 8e6))
    assert waits.account.computing == pytest.approx(1.0)


@pytest.mark.parametrize(("late", "sent", "waited"), [(10, 0.0, 0.0), (5, 0.0, 0.35), (0, 0.0, 0.85), (0, 0.5, 0.8)])
def test_what_travels_behind_computing_is_not_waited_for(late: int, sent: float, waited: float):
    """0.8 s and 0.05 s of latency; ten steps hide all of it, five 0.5 s, and half a step 0.05 s."""
    waits = replay(every_round(Swap((1e5,) * 2), 2, 10, late, sent)(50), Topology(2, SLOW), [0.1] * 2, 50)
    assert waits.waiting(11, 40) / 3 == pytest.approx(waited)


def test_a_slow_worker_keeps_the_others_waiting():
    """It waits until its own message has left, the other until that is there, 0.05 s later."""
    waits = replay(every_round(Swap((1e5,) * 2), 2, 10)(40), Topology(2, SLOW), [0.1, 0.15], 40)
    assert sum(waits.waited[0]) == pytest.approx((0.5 + 0.85) + 3 * (0.45 + 0.85))
    assert sum(waits.waited[1]) == pytest.approx(4 * 0.8)


def test_the_opening_is_not_counted_and_parts_the_starts():
    groups = ((0, 1),)
    tree = PlannedExchange(0, 0, 0, "opening", groups, by_size(groups, lambda _: Tree(1e5)), 0, "control")
    waits = replay(every_round(Swap((1e5,) * 2), 2, 10)(10), Topology(2, SLOW), [0.1] * 2, 10, [tree])
    assert waits.waited[0][0] == pytest.approx(0.8) and waits.waited[1][0] == pytest.approx(0.85)
    assert waits.waiting() == pytest.approx((0.9 + 0.8) / 2)  # the first to start waits 0.05 s longer


@pytest.mark.parametrize("late", [0, 5])
def test_a_long_run_is_played_in_part(late: int):
    """To the same seconds, where all rounds are alike; None where even a few are too many."""
    records, topology, seconds = every_round(Swap((1e5,) * 3), 3, 10, late), Topology(3, SLOW), [0.1] * 3
    whole = replay(records(407), topology, seconds, 407).account
    part = replay_run(records, Rhythm(0, 10), topology, seconds, 407, messages=40)
    assert part is not None and part.waiting == pytest.approx(whole.waiting) and part.computing == whole.computing
    settled = long_run(records, Rhythm(0, 10), topology, seconds)
    assert settled is not None and settled.waiting == pytest.approx(whole.waiting / 40, rel=0.05)
    assert replay_run(records, Rhythm(0, 10), topology, seconds, 407, messages=2) is None


def of_library(way: Way, size: str, steps: int, tmp_path) -> list[PlannedExchange]:
    from isles.training.config.reading import read_config
    from isles.training.plan.sketch import sketch_run

    flags = {"replicas.method": way.method, "world.workers": WORKERS, "run.steps": steps, "model.size": size}
    config = read_config(None, flags, [*settings_of(way), f"data.path={tmp_path}"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sketch_run(config).optimizers[0].schedule(steps)


def kind(pattern: MessagePattern) -> object:
    if isinstance(pattern, Mean):
        return [there is None for there, _ in pattern.segments]
    return [*map(kind, pattern.first), kind(pattern.second)] if isinstance(pattern, Then) else type(pattern)


@pytest.mark.parametrize("way", WAYS, ids=named)
@pytest.mark.parametrize(("size", "off"), [pytest.param("0.12M", 0.03, marks=pytest.mark.long), ("2M", 0.005)])
def test_closed_forms_are_the_librarys_exchanges(way: Way, size: str, off: float, tmp_path):
    """Moments, groups and kinds of patterns are equal; bytes nearly."""
    steps = 4 if way.every else 4 * H + 7
    job, own = job_of(size, SLOW), of_library(way, size, steps, tmp_path)
    form = form_of(way.codec, job)
    closed = way.exchanges(job, form, way.every or H, lambda round: random_pairs(WORKERS, round)).planned(steps)
    assert [one[:5] for one in closed] == [(pytest.approx(one.sent), *one[1:5]) for one in own]
    assert [kind(one.pattern(len(one.groups[0]))) for one in closed] == [
        kind(one.pattern(len(one.groups[0]))) for one in own
    ]
    sent, ours = (sum(sum(one.bytes_sent) for one in records) for records in (closed, own))
    assert sent == pytest.approx(ours, rel=off)


SMALLER = ("bf16", "int8", "int4", "fp4", "topk:64+int2")  # whose messages go as those of others
UNEVEN = Links(
    bandwidth=4e6,
    downlink=2e6,
    latency=[[0.05 if (a < 4) == (b < 4) else 0.3 for b in range(WORKERS)] for a in range(WORKERS)],
)


@pytest.mark.parametrize(
    ("way", "links"),
    [
        pytest.param(way, links, marks=[pytest.mark.long] if links is UNEVEN or way.codec in SMALLER else [])
        for links in (Links(bandwidth=1e7, latency=0.05), UNEVEN)
        for way in WAYS
    ],
    ids=lambda value: named(value) if isinstance(value, Way) else "uneven" if value is UNEVEN else "even",
)
def test_a_plan_is_of_the_long_run(way: Way, links: Links, tmp_path):
    """Of steps 200 to 400 of the library's own exchanges, of which others show that the virtual clock plays them so; of
    the methods that send in every step, 20 to 40.
    """
    first, last = (20, 40) if way.every else (200, 400)
    job = job_of("2M", links)
    seconds = [job.step_seconds * way.holds(job)] * WORKERS
    waits = replay(of_library(way, "2M", last + 2 * H, tmp_path), Topology(WORKERS, links), seconds, last + 2 * H)
    computing = (last - first) * seconds[0]
    shown = computing / (computing + waits.waiting(first + 1, last))
    said = replayed(job, way, way.every or H)
    assert said is not None and said.share == pytest.approx(shown, abs=0.02)


def test_a_plan_with_tokens_is_of_the_run():
    """With its last round, for which nothing is left to hide behind."""
    way = next(way for way in WAYS if way.method == "eager" and way.codec == "none")
    job = job_of("2M", Links(bandwidth=1e8, latency=0.05))
    long, run = replayed(job, way, H), replayed(replace(job, tokens=40.0, step_tokens=1.0), way, H)
    assert long is not None and long.share == 1.0
    assert run is not None and 0.5 < run.share < 0.9
    assert replayed(replace(job, workers=17), way, H) is None
