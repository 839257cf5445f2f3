from __future__ import annotations

import json
import random

import pytest

from isles.memory.lanes import LaneRun
from isles.memory.plan import from_json, table, trace, why
from isles.memory.search import Search
from tests.memory.instances import instance


def test_a_plan_is_read_back_from_its_json() -> None:
    made, machine = instance(random.Random(1), 4, equal=True)
    plan = Search(made, machine).run()
    again = from_json(plan.to_json())
    assert again == plan
    again.check(made, machine)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no plan of memory"),
        ("[]", "no plan of memory"),
        ('{"format": 1}', "no plan of memory"),
        ('{"format": 0}', "written by another version"),
        ('{"format": 1, "placements": [["device", "keep it"]], "names": []}', "a choice is none of this version's"),
    ],
)
def test_what_is_no_plan_is_one_line(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^memory\.plan: .*{words}[^\n]*$"):
        from_json(text)


def test_the_table_says_what_moves() -> None:
    made, machine = instance(random.Random(2), 5, equal=True)
    plan = Search(made, machine).run()
    rows = table(plan, made)
    assert [row["unit"] for row in rows] == [unit.name for unit in made.units]
    assert [row["tier"] + row["activations"] for row in rows] == [one.short for one in plan.placements]
    assert sum(row["host"] for row in rows) == plan.host_bytes
    assert all(row["why"] == why(one) for row, one in zip(rows, plan.placements, strict=True))
    busy = LaneRun(made, plan.placements, machine, budget=plan.peak).play().busy
    assert sum(row["down"] for row in rows) / machine.down == pytest.approx(busy["down"])


def test_a_trace_has_a_row_a_lane() -> None:
    made, machine = instance(random.Random(3), 3, equal=True)
    plan = Search(made, machine).run()
    timeline = LaneRun(made, plan.placements, machine, budget=plan.peak, spans=True, steps=2).play()
    events = json.loads(trace(timeline))["traceEvents"]
    device = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    assert sum(event["dur"] for event in device) == pytest.approx(2e6 * timeline.busy["device"])
    ends = [event["ts"] + event["dur"] for event in device]
    assert all(end <= event["ts"] + 1e-3 for end, event in zip(ends, device[1:], strict=False))
