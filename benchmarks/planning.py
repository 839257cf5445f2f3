"""Time of planning: `isles train --dry-run` of a long run on the virtual clock, and `isles plan methods`.

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
from isles.cli.terminal import alone
from isles.plan.methods import plan_methods
from isles.plan.question import PlanQuestion, decoder_of
from isles.plan.run_plan import plan_run
from isles.training.config.reading import read_config


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


def of_methods(workers: int) -> Callable[[], object]:
    """`isles plan methods` of a model of a billion parameters: every method."""
    question = PlanQuestion(model=decoder_of(1e9, 24), step_seconds=1.0, workers=workers, network="worldwide")

    def work() -> object:
        with alone():
            return plan_methods(question)

    return work


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
        Row("isles plan methods, 8 workers", seconds(of_methods(8)), "s", ("<=", 5.0), "1B parameters, worldwide"),
        Row("isles plan methods, 2,000 workers", seconds(of_methods(2_000)), "s", ("<=", 10.0), "the same"),
    ]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time of planning.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return report(table(), parser.parse_args().json)


if __name__ == "__main__":
    sys.exit(main())
