"""Speed of the simulators of `isles.network`: rounds of 100,000 workers at once, events one by one, the papers' tables.

    python -m benchmarks.simulator [--workers 100000] [--rounds 100] [--json]

CPU seconds of this process, one run each after a small one that warms up. Exit code 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Literal

from benchmarks._measure import Row, report
from isles.network.pauses import Pauses
from isles.papers.eager import long_run, table5
from isles.papers.fleet import Fleet, run
from isles.papers.noloco import StepLaw, two_shot_seconds, waiting
from isles.replicas.parts.quadratic import Quadratic, simulate


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def rate(workers: int, rounds: int) -> Callable[[str], float]:
    """Events a CPU second of `workers` that pause for ten minutes every few hours, 50 steps a round."""
    steps, pauses = StepLaw(count=50), Pauses(every=20_000.0, seconds=600.0)
    fleet = Fleet(workers=workers, steps=steps, message=10.0, message_variance=0.5, pauses=pauses)

    def measured(mixing: Literal["pairs", "all"]) -> float:
        begun = time.process_time()
        return run(fleet, mixing, rounds).events / (time.process_time() - begun)

    return measured


def event_rows() -> list[Row]:
    """Events a second, of pairs and of a mean over all."""
    rows = []
    for workers, rounds, bound in ((10_000, 30, 200_000.0), (100_000, 5, 100_000.0)):
        measured = rate(workers, rounds)
        for mixing, words in (("pairs", "pairs"), ("all", "a mean over all")):
            note = f"{workers:,} workers x {rounds} rounds, pausing"
            rows.append(Row(f"events of {words}", measured(mixing), "1/s", (">=", bound), note))
    return rows


def table(workers: int, rounds: int) -> list[Row]:
    """One row a simulator."""
    what, bound = f"{workers:,} workers x {rounds} rounds", ("<=", 10.0)
    steps = StepLaw(count=50)
    waiting(100, steps, rounds=2)
    setting = Quadratic(workers=workers)
    return [
        Row(
            "waiting for all and for a partner",
            seconds(lambda: waiting(workers, steps, rounds=rounds)),
            "s",
            bound,
            what,
        ),
        Row("all-reduce in two shots", seconds(lambda: two_shot_seconds(workers, 1.0, rounds)), "s", bound, what),
        Row("NoLoCo on a quadratic", seconds(lambda: simulate(setting, rounds, copies=1)), "s", bound, what),
        Row("eager-table5", seconds(table5), "s", ("<=", 1.0), "24 rows x 50 bandwidths"),
        Row("eager-long-run", seconds(long_run), "s", None, "24 rows x 5 targets"),
        *event_rows(),
    ]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Speed of the simulators.")
    parser.add_argument("--workers", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    return report(table(options.workers, options.rounds), options.json)


if __name__ == "__main__":
    sys.exit(main())
