"""SkipPipe's stored instances as problems, where their file is at hand: it is for comparison and not shipped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from isles.network.routing.problem import Paths, RoutingCosts, RoutingProblem

REFERENCE = Path("shared", "data", "skippipe_reference.json")
"""Beside the repository or a folder above."""


@cache
def _tables() -> dict[str, Any] | None:
    found = [folder / REFERENCE for folder in Path(__file__).resolve().parents[1:5] if (folder / REFERENCE).exists()]
    return json.loads(found[0].read_text()) if found else None


def instance(name: str) -> tuple[RoutingProblem, dict[str, Any]] | None:
    """(problem, the instance's table); None where the file is not at hand."""
    data = _tables()
    if data is None:
        return None
    table, links = data[name], data["links_latency_ms_bandwidth_GiBps"]
    places = table["places_of_nodes"]

    def seconds(u: int, v: int) -> float:
        one, other = places[u], places[v]
        latency, rate = (1, 2.0) if one == other else links.get(f"{one}-{other}") or links[f"{other}-{one}"]
        return 0.0 if u == v else latency / 1000 + table["microbatch_bytes"] / (rate * 2**30) + 0.35

    count = len(places)
    problem = RoutingProblem(
        stages=tuple(map(tuple, table["stages"])),
        delays=tuple(tuple(seconds(u, v) for v in range(count)) for u in range(count)),
        forward=(table["forward_s"],) * count,
        path_length=data["path_length"],
        memory=data["mem"],
        waves=data["waves_per_slot"],
        costs=RoutingCosts(rest=0.13, rest_at_origin=0.09),
    )
    return problem, table


def paths_of(problem: RoutingProblem, table: Mapping[str, Sequence[int]]) -> Paths:
    """The file's paths, one an origin or one a slot."""
    each = problem.memory if len(table) == len(problem.origins) else 1
    listed = [tuple(table[key]) for key in sorted(table, key=int) for _ in range(each)]
    return dict(zip(problem.slots, listed, strict=True))
