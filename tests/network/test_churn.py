"""Traces of workers that come and go: from files, rates and pools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from isles.network.churn import (
    POOLS,
    ChurnEvent,
    Poisson,
    check,
    churn,
    founders,
    pool,
    read_trace,
    write_trace,
)

HOUR = 3600.0


def living(events: Iterable[ChurnEvent], workers: int) -> Iterator[tuple[float, int]]:
    """(seconds, how many workers there are from then on), from (0, workers) on; one that stands still counts."""
    yield 0.0, workers
    for event in events:
        change = int(event.number) if event.kind == "join" else -1 if event.kind in ("kill", "leave") else 0
        if change:
            workers += change
            yield event.at, workers


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    events = [
        ChurnEvent(1.5, "join", 2),
        ChurnEvent(2.0, "kill", 0),
        ChurnEvent(3.0, "pause", 4),
        ChurnEvent(4.0, "lighthouse", 7.5),
        ChurnEvent(5.0, "resume", 4),
        ChurnEvent(5.0, "leave", 4),
    ]
    path = str(tmp_path / "trace.jsonl")
    write_trace(events, path)
    assert read_trace(path, workers=3) == events
    assert churn(path, workers=3, seconds=9.0) == events
    assert list(living(events, 3)) == [(0.0, 3), (1.5, 5), (2.0, 4), (5.0, 3)]


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ('{"at": 1, "kill": 9}', "trace.jsonl: kill of worker 9 at 1 s: there is no such worker then"),
        ('{"at": 1, "kill": 0}\n{"at": 2, "leave": 0}', "leave of worker 0"),
        ('{"at": 1, "resume": 0}', "it is not paused"),
        ('{"at": 1, "pause": 0}\n{"at": 2, "pause": 0}', "it is paused; resume it first"),
        ('{"at": 2, "join": 1}\n\n{"at": 1, "join": 1}', "order the lines by time"),
        ('{"at": 1, "join": 1}\nhello', "trace.jsonl:2: 'hello' is no event"),
        ("[" * 500, "is no event"),
        ('{"at": 1}', "is no event"),
        ('{"at": 1, "join": 1, "kill": 2}', "is no event"),
        ('{"at": -1, "join": 1}', "at = -1"),
        ('{"at": NaN, "join": 1}', "at = nan"),
        ('{"at": 1, "join": 0}', "join = 0"),
        ('{"at": 1, "kill": 0.5}', "kill = 0.5"),
        ('{"at": 1, "kill": true}', "kill = True"),
        ('{"at": 1, "kill": "all"}', "kill = 'all'"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, lines: str, named: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(lines, encoding="utf-8")
    with pytest.raises(ValueError) as refused:
        read_trace(str(path), workers=3)
    assert named in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("dubling", "did you mean 'doubling'"),
        ("10%", "10%/h"),
        ("10%/h, mended 5", "repair SECONDS"),
        ("nowhere.jsonl", "cannot be read (No such file"),
    ],
)
def test_names_that_are_none(name: str, named: str) -> None:
    with pytest.raises(ValueError) as refused:
        churn(name, workers=4, seconds=10.0)
    assert named in str(refused.value) and "\n" not in str(refused.value)


def test_a_rate_is_the_share_of_workers_that_die() -> None:
    """64 workers, 100 hours at 10 % an hour: 640 deaths expected, 25 the standard deviation; each is replaced."""
    events = churn("10%/h", workers=64, seconds=100 * HOUR, seed=3)
    kinds = Counter(event.kind for event in events)
    assert 540 < kinds["kill"] < 740 and kinds["join"] == kinds["kill"]
    check(events, workers=64)
    assert {count for _, count in living(events, 64)} == {63, 64}
    assert churn("10%/d", workers=64, seconds=2400 * HOUR, seed=3)[0].at == pytest.approx(24 * events[0].at)


def test_a_longer_trace_begins_like_the_shorter_one_and_another_seed_does_not() -> None:
    poisson = Poisson(per_second=1 / HOUR, repair=600.0)
    short, long = poisson.events(8, HOUR, seed=1), poisson.events(8, 5 * HOUR, seed=1)
    assert long[: len(short)] == short and len(long) > len(short)
    assert poisson.events(8, HOUR, seed=2) != short
    check(long, workers=8)


def test_repairs_take_their_time() -> None:
    """Each death is followed by a join, 600 s later on average; in the steady state a sixth of the time is repair."""
    events = churn("100%/h, repair 600", workers=50, seconds=200 * HOUR, seed=7)
    sizes = list(living(events, 50))
    ends = [at for at, _ in sizes[1:]] + [200 * HOUR]
    mean = sum(count * (end - at) for (at, count), end in zip(sizes, ends, strict=True)) / (200 * HOUR)
    assert mean == pytest.approx(50 * 3600 / 4200, rel=0.02)


def test_nobody_dies_at_a_rate_of_nothing() -> None:
    assert churn("0%/h", workers=4, seconds=1e9) == []


@pytest.mark.parametrize("name", POOLS)
def test_pools_compute_the_same(name: str) -> None:
    events = churn(name, workers=8, seconds=1000.0)
    check(events, workers=founders(name, 8))
    sizes = list(living(events, founders(name, 8)))
    ends = [at for at, _ in sizes[1:]] + [1000.0]
    assert sum(count * (end - at) for (at, count), end in zip(sizes, ends, strict=True)) == pytest.approx(6000.0)
    assert founders("constant", 8) == 6 and founders("10%/h", 8) == 8


def test_who_came_last_leaves_first() -> None:
    """Two of four, all four, two again, one."""
    leave = [ChurnEvent(at, "leave", member) for at, member in ((4.0, 3), (4.0, 2), (6.0, 1))]
    assert pool((0.5, 1.0, 0.5, 0.25), workers=4, seconds=8.0) == [ChurnEvent(2.0, "join", 2), *leave]


def test_a_pool_of_one_stays() -> None:
    assert churn("halving", workers=1, seconds=10.0) == []
