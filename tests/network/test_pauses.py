"""Pauses: one history a worker whatever is asked of it and when, means as asked for, time conserved."""

from __future__ import annotations

import math
import random

import pytest

from isles.network.pauses import Pauses

PAUSES = Pauses(every=10.0, seconds=3.0)


def test_answers_do_not_depend_on_what_was_asked_before():
    asked = [random.Random(1).uniform(0, 500) for _ in range(200)]
    one, other = PAUSES.of(3, 7), PAUSES.of(3, 7)
    forwards = {time: (one.back(time), one.after(time, 20.0)) for time in sorted(asked)}
    backwards = {time: (other.back(time), other.after(time, 20.0)) for time in sorted(asked, reverse=True)}
    assert forwards == backwards
    assert forwards != {
        time: (apart := PAUSES.of(4, 7)) and (apart.back(time), apart.after(time, 20.0)) for time in asked
    }


def test_time_is_conserved():
    away = PAUSES.of(0, 0)
    for start in (0.0, 3.3, 250.0):
        for seconds in (0.0, 1.0, 77.0):
            end = away.after(start, seconds)
            absent = sum(back - leaves for leaves, back in away.between(start, end))
            assert end - start == pytest.approx(seconds + absent, rel=1e-12)
            assert away.back(end) == end  # nobody stops computing in the middle of a pause
    halves = away.after(away.after(0.0, 40.0), 60.0)
    assert halves == pytest.approx(away.after(0.0, 100.0), rel=1e-12)


def test_means():
    whole = [PAUSES.of(rank, 0).between(0.0, 1300.0) for rank in range(100)]
    absent = sum(back - leaves for one in whole for leaves, back in one)
    assert sum(map(len, whole)) == pytest.approx(100 * 100, rel=0.05)
    assert absent == pytest.approx(100 * 300, rel=0.05)


@pytest.mark.parametrize("wrong", [{"every": 0.0}, {"seconds": -1.0}, {"every": math.inf}])
def test_no_such_pauses(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Pauses(**({"every": 1.0, "seconds": 1.0} | wrong))
