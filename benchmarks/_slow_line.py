"""What a benchmark on slow lines asks on its command line, and where it can run."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable

from benchmarks._machines import unavailable
from benchmarks._measure import Row, report


def main(description: str, workers: int, table: Callable[[int, int], list[Row]], *, paired: bool) -> int:
    """Print `table(workers, turns)` and judge it; the exit code. workers: the default; paired: an even number of them.
    Where namespaces cannot be had it says so and answers 0.
    """
    wanted = "an even number" if paired else "2 or more"
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workers", type=int, default=workers, help=f"{wanted} (default: {workers})")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.workers < 2 or (paired and options.workers % 2):
        parser.error(f"--workers {options.workers}: choose {wanted}")
    if reason := unavailable():
        print(f"{parser.prog}: skipped, {reason}", file=sys.stderr)
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):  # so that the namespaces go
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    return report(table(options.workers, options.turns), options.json)
