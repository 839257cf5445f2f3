"""Time of planning: `isles train --dry-run` of a long run on the virtual clock, and `isles plan`.

    python -m benchmarks.planning [--json]

CPU seconds of this process, one run each after a small one that warms up. Exit code 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks._measure import Row, report
from isles.network.named import links
from isles.network.planner.job import Job
from isles.network.planner.planner import plan
from isles.training.config.reading import read_config
from isles.training.plan.run_plan import plan_run


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def of_run(text: Path, steps: int, backend: str) -> Callable[[], object]:
    """The dry run of 8 ddp workers; on real workers nothing is replayed."""
    flags = {"replicas.method": "ddp", "world.workers": 8, "run.steps": steps, "world.backend": backend}
    config = read_config(None, flags, [f"data.path={text}"])
    return lambda: plan_run(config)


def of_job(workers: int) -> Callable[[], object]:
    """`isles plan` of a model of a billion parameters."""
    job = Job(parameters=1e9, layers=24, step_seconds=1.0, workers=workers, links=links("worldwide"))
    return lambda: plan(job)


def table() -> list[Row]:
    """Each of them."""
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("Islands of compute, poorly connected. " * 500)
        of_run(text, 10, "virtual")()
        plain = seconds(of_run(text, 10_000, "distributed"))
        replayed = seconds(of_run(text, 10_000, "virtual"))
    return [
        Row("dry run without replay", plain, "s", None, "ddp, 8 workers, 10,000 steps"),
        Row("the replay on top", replayed - plain, "s", ("<=", 5.0), "the same"),
        Row("isles plan, 8 workers", seconds(of_job(8)), "s", ("<=", 5.0), "1B parameters, worldwide"),
        Row("isles plan, 2,000 workers", seconds(of_job(2000)), "s", ("<=", 10.0), "the same"),
    ]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time of planning.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return report(table(), parser.parse_args().json)


if __name__ == "__main__":
    sys.exit(main())
