"""What docs/memory.md says of the papers' figures: the benchmark that makes its tables keeps to it."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from benchmarks.memory_papers import (
    FOUR,
    FOUR_GPUS,
    GB,
    LARGER,
    ONE,
    ONE_GPU,
    USABLE,
    Decoder,
    Testbed,
    autohete,
    decoder,
    fitted,
    karma_rows,
    zero_offload,
    zero_offload_floor,
)


def test_the_least_memory_of_zero_offload() -> None:
    for name, reported in (("4B", 16), ("6B", 24)):
        assert zero_offload_floor(ONE_GPU[name]) / GB == pytest.approx(reported, rel=0.12)
    room = ONE.machine.device_bytes
    assert zero_offload_floor(ONE_GPU["12B"]) <= room < zero_offload_floor(LARGER)


@pytest.mark.parametrize("name", ["4B", pytest.param("6B", marks=pytest.mark.long)])
def test_a_small_budget_beats_zero_offload_on_a_large_one(name: str) -> None:
    made, here = decoder(ONE_GPU[name]), ONE.machine
    small = replace(here, device_bytes=12 * GB * USABLE)
    assert autohete(made, small)[1] < zero_offload(made, here)


@pytest.mark.long
@pytest.mark.parametrize(("bed", "shapes"), [(ONE, ONE_GPU), (FOUR, FOUR_GPUS)])
def test_one_pair_of_constants_explains_six_ratios(bed: Testbed, shapes: dict[str, Decoder]) -> None:
    assert fitted(bed, shapes) <= 0.15


@pytest.mark.long(cases=0)
def test_policies_of_karma_come_in_their_order() -> None:
    rows = karma_rows()
    eager, capacity, planner = (
        statistics.fmean(getattr(row, name) for row in rows) for name in ("eager", "capacity", "planner")
    )
    assert eager >= capacity >= planner
    assert statistics.fmean(row.planner / row.optimum - 1 for row in rows) <= 0.01
