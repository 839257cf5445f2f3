"""Goodput of real processes of which one is killed each minute, beside what the virtual clock foretells for that trace.

    python -m benchmarks.kills [--workers 8] [--minutes 5] [--method noloco] [--json]        7 minutes as it stands

A tiny model whose inner steps take half a second, nearly all of it sleep, so that two cores are no limit. The k-th
SIGKILL is in the middle of minute k, of a worker drawn at random; another one is started at once, forked from a process
that has loaded torch. The run without kills goes on beside it; both end with the same round.

    goodput    inner steps whose work is in the final model (`inner_steps_counted`) a second, from the first view to
               the end of the last round; of the run with kills / of the run without

Bound: the real one and that of the virtual clock differ by 2 points of percent at most.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks._measure import Row, report
from isles.membership.run_log import RoundRecord
from isles.network.churn import ChurnEvent, write_trace
from isles.training.config.reading import read_config
from isles.training.elastic.metrics import recorded
from isles.training.elastic.support import going_on
from isles.training.simulated_churn import SimulatedElasticRun
from tests.training.elastic.processes import Processes
from tests.training.elastic.test_runs import EVERY, events

STEP, MINUTE = 0.5, 60.0  # seconds


def trace_of(workers: int, minutes: int, seed: int = 0) -> list[ChurnEvent]:
    """Each minute one worker dies and another one comes."""
    draw, living, trace = random.Random(seed), list(range(workers)), list[ChurnEvent]()
    for minute in range(minutes):
        at, victim = (minute + 0.5) * MINUTE, draw.choice(living)
        trace += [ChurnEvent(at, "kill", victim), ChurnEvent(at, "join", 1)]
        living[living.index(victim)] = workers + minute
    return trace


def real(folder: Path, asked: argparse.Namespace, trace: Sequence[ChurnEvent]) -> float:
    """Inner steps that count, a second, of real processes."""
    folder.mkdir()
    world = Processes(folder, f"replicas.method={asked.method}", founders=asked.workers, steps=steps(asked))
    try:
        for _ in range(asked.workers):
            world.warm_join(pause=EVERY * STEP)
        world.until(lambda: events(world.out, "view"))
        began = time.monotonic()
        for event in trace:
            time.sleep(max(began + event.at - time.monotonic(), 0.0))
            if event.kind == "kill":
                world.warm[int(event.number)].kill()
            else:
                world.warm_join(pause=EVERY * STEP)
        world.until(lambda: (world.out / "summary.json").exists(), 2 * MINUTE + MINUTE * asked.minutes)
        ended = max(one["at"] for worker in world.warm for one in worker.rounds()[-1:])
        return json.loads((world.out / "summary.json").read_text())["inner_steps_counted"] / (ended - began)
    finally:
        world.end()


def foretold(folder: Path, config: Path, trace: Sequence[ChurnEvent]) -> float:
    """The same of the virtual clock. config: of the real run."""
    own = read_config(str(config), {}, ["world.backend=virtual", f"world.virtual.step_seconds={STEP}"])
    file = folder.with_suffix(".jsonl")
    write_trace(trace, str(file))
    run = SimulatedElasticRun(going_on(own), str(file), folder, lambda line: None, lambda notice: None)
    counted = run.run()["inner_steps_counted"]
    entries, records = recorded(folder)
    began = next(entry["at"] for entry in entries if entry["event"] == "view")
    return counted / (max(one.at for one in records if isinstance(one, RoundRecord)) - began)


def steps(asked: argparse.Namespace) -> int:
    """Inner steps of the whole run."""
    return int(asked.minutes * MINUTE / STEP) // EVERY * EVERY


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--minutes", type=int, default=5)
    parser.add_argument("--method", default="noloco")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    trace = trace_of(asked.workers, asked.minutes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ThreadPoolExecutor(2) as pool:  # at once, so that a busy machine slows down both
            both = {"kills": trace, "calm": []}
            runs = [pool.submit(real, folder / name, asked, changes) for name, changes in both.items()]
        kills, calm = (run.result() for run in runs)
        config = folder / "calm" / "config.toml"
        kills_there, calm_there = foretold(folder / "one", config, trace), foretold(folder / "two", config, [])
    measured, promised = kills / calm, kills_there / calm_there
    rows = [
        Row("real", 100 * measured, "% of the run without kills", None, f"{kills:.3f} of {calm:.3f} steps/s count"),
        Row("foretold", 100 * promised, "%", None, f"{kills_there:.3f} of {calm_there:.3f} steps/s"),
        Row("difference", 100 * abs(measured - promised), "points", ("<=", 2.0)),
    ]
    return report(rows, as_json=asked.json)


if __name__ == "__main__":
    sys.exit(main())
