"""`isles plan methods` against reality: utilisations that it says, and those of real workers on lines of four rates.

    python -m benchmarks.plan_vs_measured [--workers 4] [--turns 3] [--json]       Linux, root, iproute2

Workers in network namespaces as in `benchmarks.netns`, a 0.53M-parameter model, steps paced at 150 ms; H = 5 for
methods that have it. Measured: wall of `none` / wall of the method, same turn, slowest worker, median of the turns.
The planner is told the rate without the packets' headers (as `--links probe:HOST:PORT` would measure it), no latency,
and how long a step of `none` took; the rest it knows: nothing is fitted. Rates are such that every method has two
measured utilisations between 0.2 and 0.8. Exit code 1 if the median error is above 5 points of utilisation, the worst
above 10.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks._machines import machines
from benchmarks._measure import Row
from benchmarks._slow_line import main
from benchmarks._stage import play
from benchmarks.netns import SEGMENT, Case, on_the_line, run
from isles.models import ModelConfig
from isles.plan.methods import plan_methods
from isles.plan.question import PlanQuestion, candidates

PACE = 0.150  # seconds that the computation of a step takes
H = 5
RATES = (12e6, 20e6, 60e6, 160e6)  # bits per second, packets' headers included
PATIENCE = 900.0  # seconds for a rate
MODEL = ModelConfig(size="0.53M")

CASES: dict[str, Case] = {
    "none": Case("none", steps=4 * H, warm_up=H),
    "ddp": Case("ddp", steps=8, warm_up=2),
    "diloco": Case("diloco", {"sync_every": H}, steps=4 * H, warm_up=H),
    "noloco": Case("noloco", {"sync_every": H}, steps=4 * H, warm_up=2 * H),
    "eager": Case("eager", {"sync_every": H}, steps=4 * H, warm_up=2 * H),
}


def worker(world: Any, cases: dict[str, dict[str, Any]], turns: int) -> dict[str, list[float]]:
    """Seconds of a step of every case, one entry a turn."""
    told: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(turns):
        names = list(cases)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            case = Case(**cases[name])
            told[name].append(run(world, case, PACE)["wall"] / case.steps)
    return told


def planned(method: str, step: float, workers: int, rate: float) -> float:
    """What the planner says. step: seconds. rate: bits per second."""
    network = f"{rate / 1e6:.9g}Mbit/s, 0ms"
    question = PlanQuestion(model=MODEL, step_seconds=step, workers=workers, network=network)
    as_it_is = [one for one in candidates(method) if not one.settings]
    return plan_methods(question, every=H, among=as_it_is).plans[0].utilisation


def table(workers: int, turns: int) -> list[Row]:
    """Measure at every rate, and put it beside what was planned."""
    arguments = {"cases": {name: asdict(case) for name, case in CASES.items()}, "turns": turns}
    rows, errors = [], []
    between = dict.fromkeys([name for name in CASES if name != "none"], 0)
    with machines(workers) as cast:
        for rate in RATES:
            for machine in cast:
                machine.limit(rate)
            told = play(cast, "benchmarks.plan_vs_measured:worker", arguments, PATIENCE)
            # By turn, of the slowest worker.
            steps = {name: [max(ranks) for ranks in zip(*(one[name] for one in told), strict=True)] for name in CASES}
            step = median(steps["none"])
            for name in between:
                real = median(bare / one for bare, one in zip(steps["none"], steps[name], strict=True))
                said = planned(name, step, workers, rate * SEGMENT / on_the_line(SEGMENT))
                errors.append(abs(real - said))
                between[name] += 0.2 <= real <= 0.8
                note = f"{100 * real:.1f} % measured, {100 * said:.1f} % planned; a step of none {1e3 * step:.0f} ms"
                rows.append(Row(f"{name:<7} {rate / 1e6:4.0f} Mbit/s", 100 * errors[-1], "points off", None, note))
    rows.append(Row("median error", 100 * median(errors), "points off", ("<=", 5.0)))
    rows.append(Row("worst error", 100 * max(errors), "points off", ("<=", 10.0)))
    rows.append(Row("between 0.2 and 0.8, a method", min(between.values()), "of 4 rates", (">=", 2.0), "the fewest"))
    return rows


if __name__ == "__main__":
    sys.exit(main("The planner against real workers on slow lines.", 4, table, paired=True))
