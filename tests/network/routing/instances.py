"""Made-up problems for the tests of the planner, and the reference instances where they are at hand."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from isles.network.routing.problem import Costs, Problem

REFERENCE = Path("shared", "data", "skippipe_reference.json")
"""Beside the repository or a folder above, where the authors' instances are at hand; they are not shipped."""


def drawn(seed, sizes=(2, 2, 2), *, path_length=3, memory=2, waves=2, slowest=1.0, costs=None):
    """Random symmetric delays and speeds."""
    rng, count = random.Random(seed), sum(sizes)
    delays = [[0.0] * count for _ in range(count)]
    for u in range(count):
        for v in range(u):
            delays[u][v] = delays[v][u] = round(rng.uniform(0.05, 1.5), 3)
    cuts = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    return Problem(
        stages=tuple(tuple(range(low, high)) for low, high in itertools.pairwise(cuts)),
        delays=tuple(map(tuple, delays)),
        forward=tuple(round(rng.uniform(0.2, slowest), 3) for _ in range(count)),
        path_length=path_length,
        memory=memory,
        waves=waves,
        costs=costs or Costs(),
    )


def reference(name):
    """(problem, the instance's table) of the authors' data."""
    found = [folder / REFERENCE for folder in Path(__file__).resolve().parents[3:7] if (folder / REFERENCE).exists()]
    if not found:
        pytest.skip(f"no reference instances: {REFERENCE} is not beside the repository")
    data = json.loads(found[0].read_text())
    instance, links = data[name], data["links_latency_ms_bandwidth_GiBps"]
    places = instance["places_of_nodes"]

    def seconds(u, v):
        one, other = places[u], places[v]
        latency, rate = (1, 2.0) if one == other else links.get(f"{one}-{other}") or links[f"{other}-{one}"]
        return 0.0 if u == v else latency / 1000 + instance["microbatch_bytes"] / (rate * 2**30) + 0.35

    count = len(places)
    problem = Problem(
        stages=tuple(map(tuple, instance["stages"])),
        delays=tuple(tuple(seconds(u, v) for v in range(count)) for u in range(count)),
        forward=(instance["forward_s"],) * count,
        path_length=data["path_length"],
        memory=data["mem"],
        waves=data["waves_per_slot"],
        costs=Costs(rest=0.13, rest_at_origin=0.09),
    )
    return problem, instance


def paths_of(problem, table):
    """The file's paths, one an origin or one a slot."""
    each = problem.memory if len(table) == len(problem.origins) else 1
    listed = [tuple(table[key]) for key in sorted(table, key=int) for _ in range(each)]
    return dict(zip(problem.slots, listed, strict=True))
