"""`isles pipeline replan RUN`: what a new plan would gain, from the seconds that a run by a plan has taken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer


def replan(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run by a plan, finished or going on.")],
    out: Annotated[Path | None, typer.Option(help="Write the new plan here.")] = None,
    time_budget_s: Annotated[float, typer.Option(help="Stop searching after so many seconds.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
) -> None:
    """Say how fast each node was, what the plan takes with that, and what a new one would. Stages stay as they are."""
    from dataclasses import replace

    from isles.cli.table import print_table
    from isles.network.routing.measured import planned_computing, speed_factors
    from isles.network.routing.plan import PipelinePlan, as_json, read_plan
    from isles.network.routing.problem import replay_paths
    from isles.network.routing.routes import visited
    from isles.network.routing.search import Effort, with_collisions, without_collisions
    from isles.report import settled
    from isles.report.panels import Table

    plan = read_plan(_plan_of(run))
    measured = _computing(run / "metrics.jsonl")
    factors = speed_factors(plan, measured)
    forward = tuple(seconds * factor for seconds, factor in zip(plan.problem.forward, factors, strict=True))
    problem = replace(plan.problem, forward=forward)
    effort = Effort(seconds=time_budget_s / 2)
    found = with_collisions(problem, effort, without_collisions(problem, effort, seed), seed)
    now, fresh = replay_paths(problem, plan.paths).makespan, replay_paths(problem, found).makespan
    made = PipelinePlan(problem=problem, paths=found if fresh < now else plan.paths, links=plan.links, cuts=plan.cuts)
    before, after, planned = visited(plan.routes), visited(made.routes), planned_computing(plan)
    rows = [
        [
            str(node),
            str(problem.stage_of[node]),
            f"{planned.get(node, 0.0):.3f}",
            f"{measured[node]:.3f}" if node in measured else "-",
            f"{factors[node]:.2f}",
            str(before[node]),
            str(after[node]),
        ]
        for node in range(problem.nodes)
    ]
    heads = ["node", "stage", "planned s", "measured s", "times", "visits", "then"]
    print_table(Table(heads=heads, rows=rows, names=1))
    best = min(fresh, now)
    print(f"a step was planned to take {plan.step_seconds:.6g} s; at the measured speeds {now:.6g} s")
    print(f"a new plan takes {best:.6g} s, {100 * (1 - best / now):.1f} % less")
    if out is not None:
        settled(out, as_json(made).encode())
        print(out)


def _plan_of(run: Path) -> str:
    """The file that the run's configuration names. ValueError for a run without a plan."""
    from isles.tables import read_toml

    table = read_toml(str(run / "config.toml")).get("pipeline", {})
    name = table.get("plan") if isinstance(table, dict) else None
    if not name:
        raise ValueError(f'{run}: a run without a plan; name one with pipeline.routing = "skippipe"')
    return str(name)


def _computing(metrics: Path) -> dict[int, float]:
    """Seconds of computing in a step, by worker: the mean over the steps between its first line and its last.
    ValueError where there are not two lines of a worker.
    """
    try:
        lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ValueError(f"{metrics}: cannot be read ({error.strerror}); name the directory of a run") from error
    first: dict[int, Mapping[str, Any]] = {}
    last: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        if "compute_seconds" in line:
            first.setdefault(line["worker"], line)
            last[line["worker"]] = line
    seconds = {
        worker: (end["compute_seconds"] - first[worker]["compute_seconds"]) / (end["step"] - first[worker]["step"])
        for worker, end in last.items()
        if end["step"] > first[worker]["step"]
    }
    if not seconds:
        raise ValueError(f"{metrics}: no worker has two lines of metrics yet; wait, or lower run.log_every")
    return seconds
