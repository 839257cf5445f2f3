from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from isles.memory.costs import Placement, host_bytes, least_peak
from isles.memory.lanes import LaneRun
from isles.memory.plan import InfeasibleBudget
from isles.memory.search import METHODS, Search
from tests.memory.instances import activations_instance, block, instance, uniform


def _gaps(cases: list[tuple[int, bool, str]], method: str, units: int) -> list[float]:
    """How much longer than the optimum over all plans the found one is; the bound must hold too."""
    gaps = []
    for seed, equal, update in cases:
        rng = random.Random(seed)
        made, machine = (
            activations_instance(rng, units, equal=equal) if method == "karma" else instance(rng, units, equal=equal)
        )
        settings = {"method": method, "host": math.inf, "disk": 0.0, "update": update}
        search, every = Search(made, machine, **settings), Search(made, machine, **settings)  # type: ignore[arg-type]
        plan = search.run()
        _, optimum = every.exhaustive()
        assert plan.bound <= optimum * (1 + 1e-9)
        gaps.append(search.seconds[plan.placements] / optimum - 1)
    return gaps


LONG = pytest.mark.long(cases=1)


@pytest.mark.parametrize("equal", [True, False])
def test_what_units_give_each_other_is_there_once(equal: bool) -> None:
    """Plans use that room, and the bound knows of it."""
    for seed in range(2):
        made, machine = activations_instance(random.Random(seed), 3, equal=equal)
        first, *rest = made.units
        giving = replace(made, units=(first, *(replace(unit, shared_input=unit.boundary) for unit in rest)))
        alone, both = (Search(one, machine, method="karma", host=math.inf, disk=0.0) for one in (made, giving))
        _, without = alone.exhaustive()
        plan, (_, optimum) = both.run(), both.exhaustive()
        assert optimum <= without
        assert plan.bound <= optimum * (1 + 1e-9)
        assert both.seconds[plan.placements] <= optimum * 1.03


def _optimal(gaps: list[float]) -> int:
    return sum(gap < 1e-6 for gap in gaps)


def test_small_instances_are_solved() -> None:
    gaps = _gaps([(0, True, "exact"), (1, False, "early")], "auto", 3)
    assert _optimal(gaps) >= 1
    assert max(gaps) <= 0.03


@pytest.mark.long(cases=0)
def test_four_equal_blocks() -> None:
    gaps = _gaps([(seed, True, "exact") for seed in range(20)], "auto", 4)
    assert _optimal(gaps) >= 18
    assert max(gaps) <= 0.02


@pytest.mark.long(cases=1)
@pytest.mark.parametrize("update", ["exact", "early"])
def test_four_unequal_blocks(update: str) -> None:
    gaps = _gaps([(seed, False, update) for seed in range(20)], "auto", 4)
    assert sum(gaps) / len(gaps) <= 0.015
    assert max(gaps) <= 0.08


@pytest.mark.long(cases=0)
def test_activations_alone() -> None:
    gaps = _gaps([(seed, seed % 2 == 0, "exact") for seed in range(40)], "karma", 8)
    assert _optimal(gaps) >= 36
    assert max(gaps) <= 0.05


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 40), marks=LONG), pytest.param(range(40, 200), marks=LONG)]
)
def test_no_plan_is_slower_than_a_simple_one(seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        method = rng.choice(["auto", "auto", *METHODS])
        make = activations_instance if method in ("karma", "checkpoint") else instance
        made, machine = make(rng, rng.randint(2, 10), equal=rng.random() < 0.7)
        plan = Search(made, machine, method=method).run()
        floors = [seconds for seconds in plan.floors.values() if seconds is not None]
        assert floors
        assert plan.step <= min(floors) * 1.003  # a plan is run on as little memory as costs 0.2 % at most


@pytest.mark.long
@pytest.mark.parametrize(("seeds", "units"), [(range(1), 9), pytest.param(range(6), 12, marks=pytest.mark.long)])
def test_more_memory_is_never_slower(seeds: range, units: int) -> None:
    for seed in seeds:
        made, machine = instance(random.Random(seed), units, equal=True)
        least = least_peak(made, uniform(made, "host", "recompute"))
        full = least_peak(made, uniform(made, "device", "keep"))
        before = math.inf
        for number in range(12):
            search = Search(made, machine, budget=least * 1.01 + (full - least) * number / 11, host=math.inf, disk=0.0)
            plan = search.run()
            seconds = search.seconds[plan.placements]
            assert seconds <= before * 1.01
            before = seconds


# Where the answer is known


def test_where_all_fits_nothing_moves() -> None:
    made, machine = instance(random.Random(1), 6, equal=True)
    machine = replace(machine, device_rate=1e13)  # so that updates there cost it next to nothing
    plan = Search(made, machine, budget=least_peak(made, uniform(made, "device", "keep"))).run()
    assert {one.short for one in plan.placements} == {"DK"}
    assert plan.busy["up"] == plan.busy["down"] == plan.busy["host"] == plan.host_bytes == 0
    assert plan.gap <= 0.01


def test_over_an_infinite_link_swapping_costs_nothing() -> None:
    made, machine = activations_instance(random.Random(2), 6, equal=True)
    free = replace(machine, up=math.inf, down=math.inf, up_both=math.inf, down_both=math.inf)
    plan = Search(made, free, method="karma", budget=least_peak(made, uniform(made, "device", "swap")) * 1.01).run()
    computing = Search(made, free, method="karma", budget=math.inf).run().step
    assert plan.step == pytest.approx(computing, rel=1e-6)


def test_without_a_link_activations_are_made_again() -> None:
    made, machine = activations_instance(random.Random(2), 6, equal=True)
    alone = replace(machine, up=0.0, down=0.0, up_both=0.0, down_both=0.0)
    plan = Search(made, alone).run()
    assert {one.tier for one in plan.placements} == {"device"}
    assert {one.activations for one in plan.placements} <= {"keep", "recompute"}


@pytest.mark.parametrize("equal", [True, False])
def test_a_budget_that_is_too_small_names_one_that_works(equal: bool) -> None:
    made, machine = instance(random.Random(4), 4, equal=equal)
    with pytest.raises(
        InfeasibleBudget, match=r"memory\.device_budget = .* the least that works is \d+ bytes"
    ) as caught:
        Search(made, machine, budget=1e9).run()
    least = caught.value.device_bytes
    plan = Search(made, machine, budget=least).run()
    assert plan.peak == least
    with pytest.raises(InfeasibleBudget):
        Search(made, machine, budget=least - 1).run()


@pytest.mark.long
def test_the_host_is_a_budget_too() -> None:
    made, machine = instance(random.Random(6), 4, equal=True, tight=(0.55, 0.55))
    wide = Search(made, machine, disk=0.0).run()
    assert wide.host_bytes > 0
    narrow = Search(made, machine, disk=0.0, host=wide.host_bytes * 0.9).run()
    assert narrow.host_bytes <= wide.host_bytes * 0.9
    assert narrow.step >= wide.step * (1 - 1e-9)
    made, machine = instance(random.Random(6), 8, equal=True, tight=(0.2, 0.2))
    wide = Search(made, machine, disk=0.0).run()
    disk = Search(made, machine, host=wide.host_bytes * 0.7).run()  # two units' states are in memory on their way
    assert disk.disk_bytes > 0
    assert disk.host_bytes <= wide.host_bytes * 0.7


def test_the_same_question_has_the_same_answer() -> None:
    made, machine = instance(random.Random(6), 3, equal=False)
    assert Search(made, machine).run() == Search(made, machine).run()


def test_a_plan_takes_no_more_memory_than_it_gains_by() -> None:
    made, machine = instance(random.Random(7), 4, equal=True)
    plan = Search(made, machine, budget=least_peak(made, uniform(made, "device", "keep")) * 3).run()
    assert plan.peak == least_peak(made, plan.placements)


def test_early_updates_are_never_slower() -> None:
    made, machine = instance(random.Random(8), 10, equal=True)
    plans = [Search(made, machine, update=update).run() for update in ("exact", "early")]
    assert plans[1].step <= plans[0].step * (1 + 1e-9)


@pytest.mark.parametrize(
    ("units", "equal"), [(12, False), *(pytest.param(40, equal, marks=pytest.mark.long) for equal in (True, False))]
)
def test_many_blocks(units: int, equal: bool) -> None:
    rng = random.Random(9)
    made, machine = instance(rng, units, equal=True)
    if not equal:
        made = replace(made, units=tuple(block(rng, str(number)) for number in range(units)))
        machine = replace(machine, device_bytes=least_peak(made, uniform(made, "host", "recompute")) * 1.5)
    plan = Search(made, machine).run()
    assert least_peak(made, plan.placements) <= plan.peak <= machine.device_bytes
    assert plan.host_bytes == host_bytes(made, plan.placements)
    again = LaneRun(made, plan.placements, machine, budget=plan.peak).play()
    assert again.step == plan.step


def test_methods_choose_what_is_theirs() -> None:
    made, machine = activations_instance(random.Random(10), 4, equal=True)
    for name, (tiers, activations) in METHODS.items():
        plan = Search(made, machine, method=name).run()
        assert {one.tier for one in plan.placements} <= set(tiers)
        assert {one.activations for one in plan.placements} <= set(activations)
        assert all(isinstance(one, Placement) for one in plan.placements)
