"""`isles plan memory`: whether a model fits a machine, by which plan, and what that costs; before anything runs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isles.base.parsing import parse_json
from isles.cli.plans.methods import model_of
from isles.cli.terminal import Set, print_table
from isles.report.panels import Table
from isles.report.units import format_bytes, format_count, format_percent, format_seconds

if TYPE_CHECKING:
    from isles.memory.costs import Profile
    from isles.memory.plan import MemoryPlan
    from isles.network.machines import Machine
    from isles.training.config.sections import Config


def plan_memory(
    config: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG.toml|MODEL]", help="Or '7B, 32 layers'. Default: the embedded small run."),
    ] = None,
    machine: Annotated[str | None, typer.Option(help="A known machine, or a .toml file of one.")] = None,
    device_budget: Annotated[str | None, typer.Option(help="Memory of the device, such as 12GiB.")] = None,
    host_budget: Annotated[str | None, typer.Option(help="Memory of the host, such as 64GiB.")] = None,
    disk: Annotated[str | None, typer.Option(help="A folder for what neither memory holds.")] = None,
    method: Annotated[str | None, typer.Option(help="auto, autohete, karma or checkpoint.")] = None,
    update: Annotated[str | None, typer.Option(help="exact, or early (without clipping).")] = None,
    set_: Set = None,
    stages: Annotated[int | None, typer.Option(help="Cut the model in depth: what each stage takes.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also every method, and simple plans.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, for memory.plan.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Also write the lanes of some steps for chrome://tracing.")] = None,
) -> None:
    """Fit a model into a machine's memory: the fastest plan, unit by unit, with bytes, peak and seconds of a step."""
    from isles.training.config.reading import gather, resolve
    from isles.training.memory.plans import machine_of, planned, profile_of, refusals, sharded_over

    flags: dict[str, Any] = {
        "memory.machine": machine,
        "memory.device_budget": device_budget,
        "memory.host_budget": host_budget,
        "memory.disk": disk,
        "memory.update": update,
        "memory.method": method,
    }
    if as_json and compare:
        raise ValueError("--json prints one plan and --compare a table: leave one out")
    if config is not None and not config.endswith(".toml"):
        shape = asdict(model_of(config).shape())
        config, flags = None, flags | {f"model.{key}": value for key, value in shape.items()}
    tables = gather(config, {}, [])
    if method is None and tables.get("memory", {}).get("method", "none") == "none":
        flags["memory.method"] = "auto"
    tables = gather(config, flags | _cut(tables, stages), set_ or [])
    question = resolve(tables)
    refusals(question)
    if question.pipeline.stages > 1:
        if compare or trace is not None:
            raise ValueError(
                f"{'--compare' if compare else '--trace'} is of a whole model's plan, and this one is cut into "
                f"{question.pipeline.stages} stages: leave it out, or pipeline.stages"
            )
        _print_stages(question, as_json=as_json)
        return
    with _quiet():
        here = machine_of(question)
        made = profile_of(question)
        found = planned(question, made, here)
        others = _others(question, made, here) if compare else {}
    if trace is not None:
        _write_trace(trace, found, made, here)
    if as_json:
        print(found.to_json())
        return
    print("\n".join(_head(found, made, here)))
    if sharded_over(question) is not None:
        print("note     a step takes longer by what fsdp's messages take, which no plan of memory knows")
    print()
    _table(found, made)
    busy = [
        f"{name} {format_seconds(seconds)} ({format_percent(seconds / found.step)})"
        for name, seconds in found.busy.items()
        if seconds
    ]
    print(f"\nlanes busy in a step: {', '.join(busy)}")
    if compare:
        print()
        print("\n".join(_compared(found, others)))


def _cut(tables: dict[str, dict[str, Any]], stages: int | None) -> dict[str, Any]:
    """Flags of a model that is cut: workers for whole replicas, and the loss at the last stage unless the run says."""
    if stages is None:
        return {}
    if stages < 1:
        raise ValueError(f"--stages {stages}: choose 1 or more")
    workers = int(tables.get("world", {}).get("workers", stages))
    loss_at = tables.get("pipeline", {}).get("loss_at", "last" if stages > 1 else None)
    return {"pipeline.stages": stages, "pipeline.loss_at": loss_at, "world.workers": -(-workers // stages) * stages}


def _print_stages(question: Config, *, as_json: bool) -> None:
    """A row a stage: whether the machine can host it, and by which plan."""
    from isles.memory.plan import InfeasibleBudget
    from isles.training.memory.plans import machine_of, planned, profile_of

    here, rows, plans, hosted = machine_of(question), [], [], []
    for stage in range(question.pipeline.stages):
        with _quiet():
            made = profile_of(question, stage)
            found: MemoryPlan | InfeasibleBudget
            try:
                found = planned(question, made, here)
            except InfeasibleBudget as error:
                found = error
        size = f"{len(made.units)} blocks, {format_count(made.params)}"
        if isinstance(found, InfeasibleBudget):
            least = f"{format_bytes(found.device_bytes)} at least"
            rows.append((str(stage), size, str(made.in_flight), "does not fit", least, "", ""))
            continue
        plans.append(parse_json(found.to_json()) | {"stage": stage})
        hosted.append(stage)
        peak, host = format_bytes(found.peak), format_bytes(found.host_bytes)
        rows.append((str(stage), size, str(made.in_flight), found.short, peak, host, format_seconds(found.step)))
    if as_json:
        print(json.dumps(plans))
        return
    pipeline = question.pipeline
    print(f"{made.model.partition(',')[0]} in {pipeline.stages} stages, {pipeline.microbatches} microbatches")
    which = ", ".join(map(str, hosted)) if hosted else "none"
    print(f"a worker like {here.name} ({format_bytes(here.device_bytes)}) can host stages: {which}", end="\n\n")
    heads = ("stage", "holds", "in flight", "plan", "peak", "host", "its own work a step")
    print_table(Table(heads=heads, rows=rows, names=2))


@contextmanager
def _quiet() -> Iterator[None]:
    """HiGHS prints lines of its own to the process's output: to stderr with them, so that JSON stays JSON."""
    sys.stdout.flush()
    stdout_copy = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)


def _others(question: Any, made: Profile, here: Machine) -> dict[str, MemoryPlan | None]:
    from isles.memory.config import MemoryConfig
    from isles.memory.plan import InfeasibleBudget
    from isles.memory.search import METHODS
    from isles.training.memory.plans import idle_keys, planned, refusals

    found: dict[str, MemoryPlan | None] = {}
    for name in METHODS:
        memory = replace(question.memory, method=name, plan="")
        usual = {key: getattr(MemoryConfig, key) for key in idle_keys(memory)}
        other = replace(question, memory=replace(memory, **usual))
        try:
            refusals(other)
        except ValueError:
            continue  # the run takes no such plan
        try:
            found[name] = planned(other, made, here)
        except InfeasibleBudget:
            found[name] = None
    return found


def _head(plan: MemoryPlan, made: Profile, here: Machine) -> list[str]:
    return [
        f"model    {made.model}: {format_count(made.params)} parameters, {len(made.units)} blocks; batch {made.batch} "
        f"x {made.tokens} tokens{'' if made.autocast == 'none' else ', ' + made.autocast}",
        f"machine  {here.name}: {format_bytes(here.device_bytes)} on the device, {format_bytes(here.host_bytes)} on "
        "the host",
        f"plan     {plan.method}, {plan.update} updates: {plan.short}",
        f"peak     {format_bytes(plan.peak)} of {format_bytes(plan.budget)}; host {format_bytes(plan.host_bytes)}"
        + (f"; disk {format_bytes(plan.disk_bytes)}" if plan.disk_bytes else ""),
        f"step     {format_seconds(plan.step)} simulated; no plan is below {format_seconds(plan.bound)} (gap "
        f"{format_percent(plan.gap)})",
    ]


def _table(plan: MemoryPlan, made: Profile) -> None:
    from isles.memory.plan import table

    columns = {"device": "stays", "saved": "activations", "up": "up a step", "down": "down a step", "host": "host"}
    if plan.disk_bytes:
        columns |= {"read": "read a step", "written": "written", "disk": "disk"}
    rows: list[tuple[str, ...]] = []
    for _, alike in groupby(table(plan, made), key=lambda row: {**row, "unit": ""}):
        row, *others = alike
        name = f"{row['unit']} .. {others[-1]['unit'].rpartition('.')[2]}" if others else row["unit"]
        sizes = (format_bytes(row[key]) for key in columns)
        rows.append((name, f"{row['tier']}{row['activations']}", row["why"], *sizes))
    heads = ("unit", "plan", "what", *columns.values())
    print_table(Table(heads=heads, rows=rows, names=3))


def _compared(plan: MemoryPlan, others: dict[str, MemoryPlan | None]) -> list[str]:
    lines = ["method        a step      peak      plan"]
    for name, other in others.items():
        if other is None:
            lines.append(f"{name:<12}  does not fit")
        else:
            seconds, peak = format_seconds(other.step), format_bytes(other.peak)
            lines.append(f"{name:<12}  {seconds:<10}  {peak:<8}  {other.short}")
    lines += ["", "simple plan                 a step"]
    for name, seconds in plan.floors.items():
        lines.append(f"{name:<26}  {'does not fit' if seconds is None else format_seconds(seconds)}")
    return lines


def _write_trace(path: Path, plan: MemoryPlan, made: Profile, here: Machine) -> None:
    from isles.memory.lanes import LaneRun
    from isles.memory.plan import trace

    timeline = LaneRun(
        made, plan.placements, here, budget=plan.peak, update=plan.update, accumulation=plan.accumulation, spans=True
    ).play()
    try:
        path.write_text(trace(timeline), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--trace {path}: cannot be written ({error.strerror}); name another file") from error
