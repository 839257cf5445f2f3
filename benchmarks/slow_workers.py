"""NoLoCo beside DiLoCo where one worker in eight is slow: a table of docs/which-method.md.

    python -m benchmarks.slow_workers [--seeds 0,1,2,3,4] [--write] [--json]

64 workers on the virtual clock, every eighth of them half as fast, or none; a decoder of 0.03M parameters over bytes
(the embedded text and rates) learns for 40 rounds of 8 steps. A step is charged with what one of 1B takes on an H100,
and lines are slower by as much as the model is smaller, so a message takes as long as one of 1B; the replay of 1B's own
messages among 64 workers is too large. No loss depends on the clock: a run serves all speeds and networks, whose times
are those of dry runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks._measure import Row, report
from benchmarks._once import Found, at, judging
from benchmarks._pages import written
from benchmarks.comparison.cases import AS, SMALL
from benchmarks.comparison.text import interval, table
from isles.base.tables import changed
from isles.models.sizes import parameters, shape_of
from isles.plan.run_plan import named, plan_run
from isles.report.comparison import paired, validation_loss_of
from isles.report.rundir import read_run
from isles.report.units import format_seconds
from isles.training.config.reading import read_config
from isles.training.config.sections import Config

PAGE, METHODS, ROUNDS, EVERY = "which-method.md", ("diloco", "noloco"), 40, 8
NETWORKS = {"10 Gbit/s, 30 ms": (10e9, "30ms"), "300 Mbit/s, 15 ms": (300e6, "15ms")}
"""Of every line: bits per second, one way."""
SLOW = {"one in eight half as fast": (2.0, *(1.0,) * 7), "all alike": ()}
JOB = {
    **SMALL,
    "model.context": 64,
    "data.batch_size": 4,
    "data.validation_sequences": 64,
    "inner.warmup_steps": 20,
    "replicas.sync_every": EVERY,
    "run.steps": ROUNDS * EVERY,
    "run.validate_every": 2 * EVERY,
    "world.backend": "virtual",
    "world.workers": 64,
    "model.device": "cpu",
}


def configured(method: str, seed: int, slow: str = "all alike") -> Config:
    """Of a row."""
    speeds = [f"world.virtual.step_factors={list(SLOW[slow])}"] if SLOW[slow] else []
    return read_config(None, {**JOB, "replicas.method": method, "run.seed": seed}, speeds)


def seconds(config: Config, network: str) -> float:
    """Of the whole run, paid for as one of `AS`."""
    rate, latency = NETWORKS[network]
    size, step = named(AS)
    smaller = parameters(config.model.shape()) / parameters(shape_of(size))
    terms = {"world.virtual.links": f"{rate * smaller:.6g}bit/s, {latency}", "world.virtual.step_seconds": step}
    found = plan_run(changed(config, terms)).time
    assert found is not None and found.step is not None
    return found.step * config.run.steps


def coursed(folder: Path, summary: dict[str, Any]) -> Found:
    """The losses as they came, each with the share of the steps that were made by then: the second of `at`."""
    steps, last = summary["steps"], validation_loss_of(summary)
    course = [(step / steps, loss) for step, loss in read_run(folder).validation if step < steps]
    return {"loss": last, "course": [*course, (1.0, last)]}


def shown(found: dict[str, list[Found]], hours: dict[tuple[str, str, str], float]) -> str:
    """For the page: a line a network and speed."""
    made = []
    for slow in SLOW:
        for network in NETWORKS:
            ends = [hours[method, slow, network] for method in METHODS]
            first = min(ends)
            losses = [
                [at(one, first / end) for one in found[method]] for method, end in zip(METHODS, ends, strict=True)
            ]
            apart = paired([a - b for a, b in zip(*losses, strict=True)]) if len(losses[0]) > 1 else None
            made.append([slow, network, *map(format_seconds, ends), *(f"{mean(own):.3f}" for own in losses)])
            made[-1].append(interval(apart))
    heads = ["workers", "network", *(f"time, `{method}`" for method in METHODS)]
    heads += [f"loss of `{method}` when the first has ended" for method in METHODS]
    return table([*heads, "`noloco` is ahead by"], made, names=2)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--write", action="store_true", help="put the table into docs/which-method.md")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    seeds = [int(seed) for seed in given.seeds.split(",")]
    found = {method: [judging(PAGE, method, configured(method, seed), coursed) for seed in seeds] for method in METHODS}
    hours = {
        (method, slow, network): seconds(configured(method, seeds[0], slow), network)
        for method in METHODS
        for slow in SLOW
        for network in NETWORKS
    }
    print(shown(found, hours))
    if given.write:
        written(PAGE, "benchmarks.slow_workers", f"Seeds {given.seeds}:\n\n{shown(found, hours)}")
    made = [Row(f"{method}: loss", mean(one["loss"] for one in own), "nats/byte") for method, own in found.items()]
    return report(made, given.json)


if __name__ == "__main__":
    sys.exit(main())
