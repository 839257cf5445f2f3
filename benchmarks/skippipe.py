"""Planning partial pipelines: seconds of a replay, of a search, and how far above their bounds plans are.

    python -m benchmarks.skippipe [--json]

Three made-up networks: 20 nodes in 6 stages and 42 in 8, at the twelve places of `worldwide` with messages of 4 MB, and
42 with delays drawn at random. CPU seconds of this process. Where SkipPipe's two stored instances are at hand (they are
not shipped), also what the authors' paths and our own plans take there, with a verdict on the paper's "up to 55 % less
than the full pipeline". Exit code 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from benchmarks._measure import Row, report
from benchmarks._reference import instance, paths_of
from isles.network.links import links
from isles.network.routing.plan import broken_rules, delays_of
from isles.network.routing.problem import RoutingProblem, lower_bounds, replay_paths
from isles.network.routing.search import Scores, SearchEffort, Stopwatch, assign, blind, routing_strategies

Delays = tuple[tuple[float, ...], ...]


def drawn(nodes: int, seed: int) -> Delays:
    """Symmetric delays whose logarithms are even between 0.1 and 3 s."""
    rng = random.Random(seed)
    made = [[0.0] * nodes for _ in range(nodes)]
    for u in range(nodes):
        for v in range(u):
            made[u][v] = made[v][u] = 0.1 * 30 ** rng.random()
    return tuple(map(tuple, made))


def planned(name: str, sizes: tuple[int, ...], path_length: int, delays: Delays) -> list[Row]:
    """One problem, from sizes to a plan."""
    nodes = sum(sizes)
    begun = time.process_time()
    stages = assign(sizes, delays, [1.0] * nodes, seconds=60)
    assigned = time.process_time()
    problem = RoutingProblem(stages=stages, delays=delays, forward=(1.0,) * nodes, path_length=path_length)
    full, _, without, plan = routing_strategies(problem, SearchEffort(moves=5000))
    done = time.process_time()
    assert plan.paths is not None and not broken_rules(problem, plan.paths)
    step, bound = plan.played.makespan, max(lower_bounds(problem).values())
    words = f"{step:.1f} s a step; bound {bound:.1f}, without collisions {without.played.makespan:.1f}, "
    words += f"full pipelines {full.played.makespan:.1f}"
    return [
        Row(f"{name}: step / lower bound", step / bound, "", ("<=", 1.6), words),
        Row(f"{name}: assigning nodes", assigned - begun, "s", ("<=", 60.0)),
        Row(f"{name}: paths", done - assigned, "s", ("<=", 60.0)),
    ]


def replays() -> list[Row]:
    """One replay of 30 microbatches through 4 of 6 stages."""
    delays = drawn(20, 0)
    stages = ((0, 1, 2, 3, 4), *(tuple(range(5 + 3 * k, 8 + 3 * k)) for k in range(5)))
    problem = RoutingProblem(stages=stages, delays=delays, forward=(1.0,) * 20, path_length=4)
    paths, stopwatch = blind(problem), Stopwatch(problem)
    rows = []
    for name, work in (
        ("events", lambda: replay_paths(problem, paths)),
        ("stopwatch of the search", lambda: stopwatch(list(paths.values()))),
    ):
        times = []
        for _ in range(50):
            begun = time.process_time()
            work()
            times.append(time.process_time() - begun)
        rows.append(Row(f"replay of 30 microbatches, {name}", 1000 * min(times), "ms", ("<=", 5.0), "least of 50"))
    return rows


STORED = {
    "instance_shipped": {
        "paths_ca_one_per_origin": 33.31,
        "paths_random": 48.92,
        "paths_nonca_key_origin_index_times_3_plus_slot": 35.43,
    },
    "instance_head_defaults": {"paths_ca": 78.69},
}
"""Seconds that a replay of the authors' paths should take, by their names."""


def stored(name: str) -> list[Row]:
    """One of the authors' instances; nothing where their file is not at hand. The random paths are no evidence: two of
    them cross a line that is a slip of the table.
    """
    found = instance(name)
    if found is None:
        return []
    problem, given = found
    short, made = name.removeprefix("instance_"), []
    for key, seconds in STORED[name].items():
        paths = paths_of(problem, given[key])
        takes, broken = replay_paths(problem, paths).makespan, broken_rules(problem, paths)
        within = 0.03 * seconds if "nonca" in key else 0.01
        words = f"{takes:.2f} s, {seconds} expected; {broken[0] if broken else 'legal'}"
        made.append(
            Row(f"{short}: replay of {key.split('_')[1]}, apart", abs(takes - seconds), "s", ("<=", within), words)
        )
    begun = time.process_time()
    full, _, without, plan = routing_strategies(problem, SearchEffort())
    spent = time.process_time() - begun
    step, whole, fewer = plan.played.makespan, full.played.makespan, problem.path_length / len(problem.stages)
    most, unaware = (33.32, ("<=", 34.4)) if short == "shipped" else (0.91 * 78.69, None)
    score = Scores(problem.delays, problem.forward)
    own = score(assign([len(stage) for stage in problem.stages], problem.delays, problem.forward, seconds=60))
    return [
        *made,
        Row(f"{short}: own plan", step, "s", ("<=", most), f"all four strategies in {spent:.1f} CPU s"),
        Row(f"{short}: own plan without collisions", without.played.makespan, "s", unaware),
        Row(f"{short}: full pipeline", whole, "s", None, f"{len(full.routes)} microbatches as well"),
        Row(f"{short}: shorter than the full pipeline", 100 * (1 - step / whole), "%", (">=", 55.0),
            f"{100 * (1 - fewer):.0f} % by fewer stages alone"),
        Row(f"{short}: own assignment's score / theirs", own / given["ga_score"], "", ("<=", 1.0), f"{own:.2f}"),
    ]  # fmt: skip


def table() -> list[Row]:
    """All rows."""
    return [
        *replays(),
        *stored("instance_shipped"),
        *stored("instance_head_defaults"),
        *planned("20 nodes, worldwide", (5, 3, 3, 3, 3, 3), 4, delays_of(links("worldwide"), 20, 4e6, 0.05)),
        *planned("42 nodes, worldwide", (7, 5, 5, 5, 5, 5, 5, 5), 6, delays_of(links("worldwide"), 42, 4e6, 0.05)),
        *planned("42 nodes, drawn", (7, 5, 5, 5, 5, 5, 5, 5), 6, drawn(42, 1)),
    ]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Planning partial pipelines.")
    parser.add_argument("--json", action="store_true", help="print JSON, nothing else")
    return report(table(), parser.parse_args().json)


if __name__ == "__main__":
    sys.exit(main())
