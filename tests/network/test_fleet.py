"""The event simulator: against the recursions that it unrolls, bit for bit, and in the order of time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from isles.network.pauses import Pauses
from isles.papers.calculations import sheet
from isles.papers.fleet import ARRIVED, COMPUTED, Fleet, _Rounds, run
from isles.papers.noloco import StepLaw

FLEET = Fleet(workers=9, steps=StepLaw(count=5), message=4.0, message_variance=0.7, seed=3)
PAUSED = Fleet(
    workers=9,
    steps=StepLaw(count=5),
    message=4.0,
    message_variance=0.7,
    seed=3,
    pauses=Pauses(every=40.0, seconds=30.0),
)
ROUNDS = 40


def unrolled(fleet: Fleet, mixing: str) -> list[float]:
    """The clocks round by round, everybody at once."""
    drawn = _Rounds(fleet, mixing == "pairs")
    away = [None if fleet.pauses is None else fleet.pauses.of(worker, fleet.seed) for worker in range(fleet.workers)]
    clocks = [0.0] * fleet.workers
    for number in range(ROUNDS):
        for worker, one in enumerate(away):
            start, seconds = clocks[worker], drawn.seconds(number)[worker]
            clocks[worker] = start + seconds if one is None else one.after(start, seconds)
        asked = [drawn.messages(number) for _ in clocks]
        (taken, partners) = asked[0]
        if mixing == "pairs":
            there = [clocks[other] + taken[other] for other in partners]
            met = [max(clock, there[i]) if partners[i] != i else clock for i, clock in enumerate(clocks)]
        else:
            mean = max(clock + seconds for clock, seconds in zip(clocks, taken, strict=True))
            met = [mean + back for back in drawn.arrivals(number)]
        clocks = [clock if one is None else one.back(clock) for clock, one in zip(met, away, strict=True)]
    return clocks


@pytest.mark.parametrize("fleet", [FLEET, PAUSED], ids=["up", "pausing"])
@pytest.mark.parametrize("mixing", ["pairs", "all"])
def test_events_come_to_what_the_recursion_says(fleet, mixing):
    log = []
    outcome = run(fleet, mixing, ROUNDS, log)
    assert list(outcome.clocks) == pytest.approx(unrolled(fleet, mixing), rel=1e-12)
    assert all(before <= after for before, after in pairwise(log))  # a clock that ran back would stand out
    assert len(log) == len(set(log)) == outcome.events
    kinds = np.bincount([kind for _, kind, _, _ in log])
    alone = ROUNDS if mixing == "pairs" else -9 * ROUNDS  # the odd one is sent nothing; of a mean, two messages each
    assert (kinds[COMPUTED], kinds[ARRIVED]) == (9 * ROUNDS, 9 * ROUNDS - alone)
    again = []
    assert run(fleet, mixing, ROUNDS, again) == outcome and again == log


def test_pairs_wait_less_and_pauses_cost_time():
    up, paused = (
        {mixing: run(fleet, mixing, ROUNDS).seconds for mixing in ("pairs", "all")} for fleet in (FLEET, PAUSED)
    )
    assert up["pairs"] < up["all"] and all(up[mixing] < paused[mixing] for mixing in up)


def test_constant_times_by_hand():
    fleet = Fleet(workers=6, steps=StepLaw(count=1, mu=0.0, variance=0.0), message=0.25)
    assert run(fleet, "all", 10).clocks == pytest.approx([10 * 1.5] * 6)
    assert run(fleet, "pairs", 10).clocks == pytest.approx([10 * 1.25] * 6)


@pytest.mark.parametrize(("field", "value"), [("workers", 0), ("message", -1.0), ("message_variance", -1.0)])
def test_no_such_fleet(field, value):
    with pytest.raises(ValueError, match=f"{field} = {value}"):
        Fleet(**({"workers": 2, "steps": StepLaw(count=1)} | {field: value}))
    with pytest.raises(ValueError, match="rounds = 0"):
        run(FLEET, "pairs", 0)


def test_the_preset_tells_what_the_fleet_does():
    """No pauses: a mean over all costs more than a pair, and more the larger the fleet; pauses make it worse."""
    rows = sheet("noloco-fleet").data["rows"]
    calm, paused = (
        [row["all_seconds"] / row["pairs_seconds"] for row in rows if (row["pauses"] == "none") == quiet]
        for quiet in (True, False)
    )
    assert calm == sorted(calm) and calm[0] > 1
    assert paused[-1] > 2 * calm[-1]
