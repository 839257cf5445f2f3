"""What the workers of an island tell each other about refusals."""

from __future__ import annotations

import json
from typing import Any

from isles.comm.elastic.guards.refusals import OTHERS, Refusals, together, told_rows
from isles.comm.elastic.island import IslandGroup
from isles.comm.mesh import Mesh
from isles.comm.virtual.run import run_virtual


def work(world: Mesh) -> Any:
    refused = Refusals()
    for _ in range(world.rank):
        refused.note(7, "too long")
    refused.note(-1, f"of {world.rank}")
    told = IslandGroup(world).gather_text(json.dumps(refused.rows()).encode())
    return together(told_rows(json.loads(one)) for one in told)


def test_what_all_places_refuse_is_counted_together() -> None:
    results = run_virtual(work, 3, links="lan")
    assert results == [[(-1, "of 0", 1), (-1, "of 1", 1), (-1, "of 2", 1), (7, "too long", 3)]] * 3


def test_reasons_of_many_places_do_not_fill_the_memory() -> None:
    rows = together([[(seat, f"why {number}", 2) for number in range(200)] for seat in range(3)])
    assert len(rows) <= 257 and sum(times for *_, times in rows) == 1200 and (-1, OTHERS) in {row[:2] for row in rows}
    assert told_rows(json.loads(json.dumps(rows))) == rows
