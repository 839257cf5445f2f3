"""Planning partial pipelines: seconds of a replay, of a search, and how far above their bounds plans are.

    python -m benchmarks.skippipe [--json]

Three made-up networks: 20 nodes in 6 stages and 42 in 8, at the twelve places of `worldwide` with messages of 4 MB, and
42 with delays drawn at random. CPU seconds of this process. Exit code 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from benchmarks._measure import Row, report
from isles.network.named import links
from isles.network.routing.assign import assign
from isles.network.routing.bounds import lower_bounds
from isles.network.routing.check import broken_rules
from isles.network.routing.delays import delays_of
from isles.network.routing.problem import Problem, replay_paths
from isles.network.routing.search import Effort, blind
from isles.network.routing.stopwatch import Stopwatch
from isles.network.routing.strategies import strategies

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
    problem = Problem(stages=stages, delays=delays, forward=(1.0,) * nodes, path_length=path_length)
    full, _, without, plan = strategies(problem, Effort(moves=5000))
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
    problem = Problem(stages=stages, delays=delays, forward=(1.0,) * 20, path_length=4)
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


def table() -> list[Row]:
    """All rows."""
    return [
        *replays(),
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
