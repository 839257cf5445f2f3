from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from isles.memory.costs import ACTIVATIONS, TIERS, Placement, Profile, least_peak, unit_time
from isles.memory.lanes import Deadlock, LaneRun
from isles.network.machines import Machine
from tests.memory.instances import NOTHING, instance, priority_gains, uniform

MIB = 2**20


def test_all_on_the_device_is_the_sum_of_its_tasks() -> None:
    made, machine = instance(random.Random(1), 5, equal=False)
    placements = uniform(made, "device", "keep")
    times = [unit_time(unit, one, machine) for unit, one in zip(made.units, placements, strict=True)]
    found = LaneRun(made, placements, machine, budget=math.inf, accumulation=3).play()
    wanted = 3 * sum(one.forward + one.backward for one in times) + sum(one.update for one in times)
    assert found.step == pytest.approx(wanted)
    assert [found.busy[name] for name in ("up", "down", "host", "read", "write")] == [0.0] * 5


def test_an_update_on_the_device_by_hand() -> None:
    """Weights and states are read and written, gradients read: 2 (8 + 16) + 8 bytes, at 7 bytes a second."""
    made, machine = instance(random.Random(1), 1, equal=True)
    unit = replace(made.units[0], weights=8, states=16)
    assert unit_time(unit, Placement("device", "keep"), replace(machine, device_rate=7.0)).update == 8.0


def test_a_step_by_hand() -> None:
    # Two units on the host: 1 s up each, forward 1 s, backward 2 s, gradients 2 s down, update 3 s.
    made, machine = instance(random.Random(1), 2, equal=True)
    unit = replace(made.units[0], params=3000, weights=2000, moved=2000, forward=1.0, backward=2.0)
    made = replace(made, units=(unit, replace(unit, name="1")))
    machine = replace(machine, up=2000.0, down=1000.0, up_both=2000.0, down_both=1000.0, host_update=1000.0)
    found = LaneRun(made, uniform(made, "host", "keep"), machine, budget=math.inf, steps=6).play()
    # Both copies stay from forward to backward. First step: copies up 0 to 1 and 1 to 2, forward 1 to 2 and 2 to 3,
    # backward of unit 1 to 5, of unit 0 to 7, gradients down to 7 and 9. Then updates, unit 0 to 12, unit 1 to 15; its
    # copy is up at 13, forward to 14; that of unit 1 at 16, forward to 17; backward to 19 and 21, gradients to 23.
    assert found.step == pytest.approx(14.0)


def test_early_updates_begin_as_gradients_come() -> None:
    made, machine = instance(random.Random(1), 2, equal=True)
    unit = replace(made.units[0], params=3000, weights=2000, moved=2000, forward=1.0, backward=2.0)
    made = replace(made, units=(unit, replace(unit, name="1")))
    machine = replace(machine, up=2000.0, down=1000.0, up_both=2000.0, down_both=1000.0, host_update=1000.0)
    exact, early = (
        LaneRun(made, uniform(made, "host", "keep"), machine, budget=math.inf, steps=6, update=update).play()
        for update in ("exact", "early")
    )
    # ModelUnit 1's update begins two seconds before unit 0's gradients are there.
    assert early.step < exact.step


def test_both_directions_at_once_are_slower() -> None:
    made, machine = instance(random.Random(3), 6, equal=True)
    slow = replace(machine, up_both=machine.up / 2, down_both=machine.down / 2)
    plan = uniform(made, "device", "swap")
    budget = least_peak(made, plan) * 1.2
    assert (
        LaneRun(made, plan, slow, budget=budget).play().step > LaneRun(made, plan, machine, budget=budget).play().step
    )


def _random_case(rng: random.Random) -> tuple[Profile, Machine, tuple[Placement, ...], int]:
    count, accumulation = rng.randint(2, 7), rng.randint(1, 3)
    made, machine = instance(rng, count, equal=rng.random() < 0.5)
    sizes = {
        key: int(rng.uniform(0, 1000 * MIB))
        for key in ("top", "bottom", "top_gradients", "bottom_gradients", "carried")
    }
    made = replace(made, ends=replace(NOTHING, flops=1e9, **sizes), stream=int(rng.uniform(0, 500 * MIB)))
    plan = tuple(Placement(rng.choice(TIERS), rng.choice(ACTIVATIONS)) for _ in range(count))
    return made, machine, plan, accumulation


@pytest.mark.parametrize("seeds", [range(120), pytest.param(range(120, 1500), marks=pytest.mark.long)])
def test_a_plan_that_fits_without_fetching_ahead_never_deadlocks(seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        made, machine, plan, accumulation = _random_case(rng)
        budget = least_peak(made, plan, accumulation) * rng.choice([1.0, 1.0, 1.3])
        found = LaneRun(
            made,
            plan,
            machine,
            budget=budget,
            update=rng.choice(["exact", "early"]),
            accumulation=accumulation,
            first_come=rng.random() < 0.5,
            steps=3,
        ).play()
        assert found.peak <= budget
        # The first step lacks the updates of a step before it, so three hold at least two of every lane.
        assert found.step * 3 >= max(found.busy.values()) * 2 * (1 - 1e-9)


def test_less_than_a_plan_needs_is_said() -> None:
    made, machine = instance(random.Random(1), 3, equal=True)
    plan = uniform(made, "host", "swap")
    with pytest.raises(Deadlock):
        LaneRun(made, plan, machine, budget=least_peak(made, plan) - 1).play()


@pytest.mark.parametrize(("update", "least"), [("exact", 1.08), ("early", 1.03)])
def test_priority_is_never_slower_than_first_come(update: str, least: float) -> None:
    gains = priority_gains(update)
    assert min(gains) >= 0.999
    assert sum(gains) / len(gains) >= least
