"""`isles plan check`: is a plan of paths legal? `isles plan replan`: a new one for the speeds that a run measured."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer


def check(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan's JSON file.")],
    links: Annotated[str | None, typer.Option(help="Also refuse it unless it was made for this network.")] = None,
) -> None:
    """Check a plan of paths: print every rule that it breaks; exit code 2 if there is one."""
    from isles.network.networks import links as named
    from isles.network.routing.plan import complaints, read_unchecked
    from isles.network.routing.problem import lower_bounds
    from isles.network.routing.speeds import fingerprint

    read, stated = read_unchecked(plan)
    wrong = complaints(read, stated)
    for line in wrong[:-1]:
        print(f"isles: {plan}: {line}", file=sys.stderr)
    if wrong:
        raise ValueError(f"{plan}: {wrong[-1]}")
    if links is not None:
        network = named(links)
        network.check(read.problem.nodes)
        read.refuse(links=fingerprint(network, read.problem.nodes))
    bound = max(lower_bounds(read.problem).values())
    print(f"{plan}: legal; a step takes {stated:.6g} s, no plan for it less than {bound:.6g} s")


def replan(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run by a plan, finished or going on.")],
    out: Annotated[Path | None, typer.Option(help="Write the new plan here.")] = None,
    budget: Annotated[str, typer.Option(help="Stop the search after this time.")] = "60s",
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
) -> None:
    """Plan the paths of a run again with the speeds that its nodes had. Stages stay as they are."""
    from dataclasses import replace

    from isles.cli.plans.paths import check_out, search_seconds
    from isles.cli.terminal import print_table
    from isles.network.routing.plan import as_json, read_plan
    from isles.network.routing.routes import visited
    from isles.network.routing.search import SearchEffort, with_collisions, without_collisions
    from isles.network.routing.speeds import planned_computing, speed_factors
    from isles.report import settled
    from isles.report.panels import Table

    check_out(out)
    seconds = search_seconds(budget)
    plan = read_plan(_plan_of(run))
    measured = _computing(run / "metrics.jsonl")
    factors = speed_factors(plan, measured)
    forward = tuple(own * factor for own, factor in zip(plan.problem.forward, factors, strict=True))
    problem = replace(plan.problem, forward=forward)
    effort = SearchEffort(seconds=seconds / 2)
    found = with_collisions(problem, effort, without_collisions(problem, effort, seed), seed)
    slowed, fresh = replace(plan, problem=problem), replace(plan, problem=problem, paths=found)
    now, made = slowed.step_seconds, min(fresh, slowed, key=lambda one: one.step_seconds)
    before, after, planned = visited(plan.routes), visited(made.routes), planned_computing(plan)
    rows = []
    for node in range(problem.nodes):
        took = f"{measured[node]:.3f}" if node in measured else "-"
        seconds = [f"{planned.get(node, 0.0):.3f}", took, f"{factors[node]:.2f}"]
        rows.append([str(node), str(problem.stage_of[node]), *seconds, str(before[node]), str(after[node])])
    heads = ["node", "stage", "planned s", "measured s", "times", "visits", "then"]
    print_table(Table(heads=heads, rows=rows, names=1))
    best = made.step_seconds
    print(f"a step was planned to take {plan.step_seconds:.6g} s; at the measured speeds {now:.6g} s")
    print(f"a new plan takes {best:.6g} s, {100 * (1 - best / now):.1f} % less")
    if out is not None:
        settled(out, as_json(made).encode())
        print(out)


def _plan_of(run: Path) -> str:
    """The file that the run's configuration names. ValueError for a run without a plan."""
    from isles.base.tables import read_toml
    from isles.training.config.trust import beside

    if not (run / "config.toml").is_file():
        raise ValueError(f"{run}: no config.toml there; name the directory of a run")
    tables = read_toml(str(run / "config.toml"))
    beside(tables, run)
    table: Any = tables
    for key in ("pipeline", "skippipe", "plan"):
        table = table.get(key, {}) if isinstance(table, dict) else {}
    name = table
    if not name:
        raise ValueError(f'{run}: a run without a plan; name one with pipeline.routing = "skippipe"')
    return str(name)


def _computing(metrics: Path) -> dict[int, float]:
    """Seconds of computing in a step, by worker: the mean over the steps between its first line and its last.
    ValueError where there are not two lines of a worker.
    """
    from json import loads

    try:
        lines = [loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
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
