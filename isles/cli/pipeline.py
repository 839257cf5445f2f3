"""`isles pipeline`: plans for microbatches that leave out stages and exchange them. Never loads torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from isles.network.links import Links
    from isles.network.routing.assign import Stages
    from isles.network.routing.plan import PipelinePlan
    from isles.report.sheet import Sheet

app = typer.Typer(help="Plan partial, reordered pipelines for uneven links.", no_args_is_help=True)


@app.command("plan")
def plan(
    links: Annotated[str, typer.Argument(metavar="LINKS", help="Network between the nodes: a .toml file or a preset.")],
    stages: Annotated[
        str, typer.Option(help="Nodes of each stage: how many, such as 5,3,3; or which, such as 0,1/2,3/4,5.")
    ],
    out: Annotated[Path, typer.Option(help="Write the plan here, and its pictures beside it.")],
    message: Annotated[
        str | None, typer.Option("--bytes", help="Bytes of a microbatch between stages, such as 33.5M.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Instead of --bytes: tokens of a microbatch.")] = None,
    width: Annotated[int | None, typer.Option(help="With --tokens: of the stream.")] = None,
    boundary: Annotated[str | None, typer.Option(help="With --tokens: what crosses, such as dct:0.9.")] = None,
    boundary_codec: Annotated[str | None, typer.Option(help="With --tokens: in what form, such as int8.")] = None,
    forward: Annotated[
        str | None,
        typer.Option(help="Seconds of a forward of one microbatch: for all, or for each node: 0.4,0.4,1.6."),
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Instead: machines, one for all or for each node: 'A100-40,RTX 3060,my.toml'.")
    ] = None,
    operations: Annotated[
        str | None, typer.Option(help="With --hardware: operations of such a forward through a stage, as 1.2T.")
    ] = None,
    step_factors: Annotated[
        str | None, typer.Option(help="How many times as long each node takes, as world.step_factors: 1,1,4.")
    ] = None,
    path_length: Annotated[int | None, typer.Option(help="Stages that a microbatch runs. Default: all.")] = None,
    skip_ratio: Annotated[float | None, typer.Option(help="Instead: the share of stages left out, as 0.33.")] = None,
    memory: Annotated[int, typer.Option(help="Microbatches that a node holds.")] = 3,
    waves: Annotated[int, typer.Option(help="Microbatches of a slot in a step, one after the other.")] = 2,
    overhead: Annotated[str, typer.Option(help="Seconds a message costs beside its line, such as 350ms.")] = "0",
    backward: Annotated[float, typer.Option(help="Seconds of a backward, as a multiple of the forward's.")] = 1.5,
    loss: Annotated[
        float, typer.Option(help="Seconds of head and loss with their gradient, as such a multiple.")
    ] = 0.25,
    cut: Annotated[str | None, typer.Option(help="First block of each stage but the first, such as 4,8.")] = None,
    time_budget_s: Annotated[float, typer.Option(help="Stop searching after so many seconds.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")] = False,
) -> None:
    """Find paths for all microbatches of a step, and say what each strategy would take."""
    from isles.network.named import links as named
    from isles.network.routing.assign import assign
    from isles.network.routing.delays import delays_of, fingerprint
    from isles.network.routing.plan import PipelinePlan, as_json
    from isles.network.routing.problem import Costs, Problem
    from isles.network.routing.search import Effort
    from isles.network.routing.speeds import forward_seconds
    from isles.network.routing.strategies import strategies
    from isles.network.units import parse_seconds
    from isles.report.sheets.pipeline import pipeline_sheet

    _refuse(out, time_budget_s)
    effort = Effort(seconds=0.6 * time_budget_s)
    nbytes = _message_bytes(message, tokens, width, boundary, boundary_codec)
    network = named(links)
    sizes, given = _stages(stages)
    times = forward_seconds(sum(sizes), forward=forward, hardware=hardware, operations=operations, factors=step_factors)
    delays = delays_of(network, len(times), nbytes, parse_seconds("--overhead", overhead))
    seats = given or assign(sizes, delays, times, seed=seed, seconds=0.3 * time_budget_s)
    problem = Problem(
        stages=seats,
        delays=delays,
        forward=times,
        path_length=_length(path_length, skip_ratio, stages=len(seats)),
        memory=memory,
        waves=waves,
        costs=Costs(loss=loss, backward=backward),
    )
    cuts = None if cut is None else _cuts(cut, len(problem.stages))
    found = strategies(problem, effort, seed)
    assert found[-1].paths is not None
    made = PipelinePlan(problem=problem, paths=found[-1].paths, links=fingerprint(network, problem.nodes), cuts=cuts)
    sheet = pipeline_sheet(problem, found, nbytes, links, _on_lines(made, network, nbytes, overhead))
    _write(out, as_json(made), sheet)
    _show(sheet, json)
    print(out, file=sys.stderr if json else sys.stdout)


@app.command("check")
def check(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan's JSON file.")],
    links: Annotated[str | None, typer.Option(help="Also refuse it unless it was made for this network.")] = None,
) -> None:
    """Say every rule that a plan breaks; exit code 2 if there is one."""
    from isles.network.named import links as named
    from isles.network.routing.bounds import lower_bounds
    from isles.network.routing.delays import fingerprint
    from isles.network.routing.plan import complaints, read_unchecked

    read, said = read_unchecked(plan)
    wrong = complaints(read, said)
    for line in wrong[:-1]:
        print(f"isles: {plan}: {line}", file=sys.stderr)
    if wrong:
        raise ValueError(f"{plan}: {wrong[-1]}")
    if links is not None:
        network = named(links)
        network.check(read.problem.nodes)
        read.refuse(links=fingerprint(network, read.problem.nodes))
    bound = max(lower_bounds(read.problem).values())
    print(f"{plan}: legal; a step takes {said:.6g} s, no plan for it less than {bound:.6g} s")


@app.command("replan")
def replan(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run by a plan, finished or going on.")],
    out: Annotated[Path | None, typer.Option(help="Write the new plan here.")] = None,
    time_budget_s: Annotated[float, typer.Option(help="Stop searching after so many seconds.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
) -> None:
    """Say how fast each node was, what the plan takes with that, and what a new one would. Stages stay as they are."""
    from dataclasses import replace

    from isles.cli.table import print_table
    from isles.network.routing.plan import PipelinePlan, as_json, read_plan
    from isles.network.routing.problem import replay_paths
    from isles.network.routing.routes import visited
    from isles.network.routing.search import Effort, with_collisions, without_collisions
    from isles.network.routing.speeds import planned_computing, speed_factors
    from isles.report import settled
    from isles.report.panels import Table

    _refuse(out, time_budget_s)
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


def _refuse(out: Path | None, time_budget_s: float) -> None:
    """ValueError for what would else be found when the search is over."""
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        mend = "is a directory; name a file" if out.is_dir() else f"{out.parent} is no directory; make it first"
        raise ValueError(f"--out {out}: {mend}")
    if not time_budget_s > 0:
        raise ValueError(f"--time-budget-s {time_budget_s:g}: choose seconds above 0")


def _message_bytes(
    message: str | None, tokens: str | None, width: int | None, boundary: str | None, codec: str | None
) -> int:
    """Of a microbatch between stages: as told, or of the boundary, forward in float32, which is the longer way."""
    from isles.cli.plan_job import boundary_of
    from isles.network.units import parse_count

    if (message is None) == ((tokens, width, boundary, codec) == (None,) * 4):
        raise ValueError("give --bytes of a microbatch between stages, or --tokens and --width, with --boundary")
    if message is not None:
        return round(parse_count("--bytes", message))
    if tokens is None or width is None:
        raise ValueError(f"missing: {'--tokens of a microbatch' if tokens is None else '--width of the stream'}")
    if width < 1:
        raise ValueError(f"--width {width}: choose 1 or more")
    crosses = boundary_of(boundary, codec)
    if crosses.is_one_way:
        raise ValueError(
            f"--boundary {boundary}: with a plan the loss is computed at the origin, and what leaves the last visit "
            "does not fit through; choose dct:0.75"
        )
    return crosses.sizes(parse_count("--tokens", tokens), width).forward


def _stages(words: str) -> tuple[list[int], Stages | None]:
    """(nodes of each stage, which they are where that is said)."""
    if "/" not in words:
        return _numbers("--stages", words, 1), None
    given = tuple(tuple(_numbers("--stages", part, 0)) for part in words.split("/"))
    return [len(part) for part in given], given


def _on_lines(made: PipelinePlan, network: Links, nbytes: int, overhead: str) -> float | None:
    """Seconds of a step over the lines of the network, which know no overhead of messages."""
    from isles.network.routing.problem import replay_paths
    from isles.network.routing.wires import MessageLines, Sizes
    from isles.network.topology import Topology
    from isles.network.units import parse_seconds

    if parse_seconds("--overhead", overhead):
        return None
    sizes = Sizes(forward=nbytes, home=nbytes, backward=nbytes)
    wire = MessageLines(Topology(made.problem.nodes, network), sizes)
    return replay_paths(made.problem, made.paths, wire).makespan


def _length(path_length: int | None, skip_ratio: float | None, *, stages: int) -> int:
    if path_length is not None and skip_ratio is not None:
        raise ValueError("--path-length and --skip-ratio say the same: give one of them")
    if skip_ratio is not None:
        if not 0 <= skip_ratio < 1:
            raise ValueError(f"--skip-ratio {skip_ratio}: choose 0 or more and less than 1")
        return max(1, round(stages * (1 - skip_ratio)))
    return stages if path_length is None else path_length


def _cuts(text: str, stages: int) -> tuple[int, ...]:
    cuts = tuple(_numbers("--cut", text, 1))
    if len(cuts) != stages - 1 or list(cuts) != sorted(set(cuts)):
        raise ValueError(
            f"--cut {text}: give {stages - 1} growing numbers, the first block of each stage but the first"
        )
    return cuts


def _numbers(option: str, text: str, least: int) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise ValueError(f"{option} {text}: write whole numbers from {least} with commas between, such as 5,3,3")
    return numbers


def _write(out: Path, text: str, sheet: Sheet) -> None:
    """The plan, and beside it the sheet's pictures: one PNG of all, an SVG of each."""
    from isles.report import settled
    from isles.report.draw.png import picture
    from isles.report.draw.svg_time import alone

    settled(out, text.encode())
    settled(out.with_suffix(".png"), picture(sheet.title, sheet.subtitle, sheet.panels, sheet.table))
    for name, panel in zip(("steps", "ways"), sheet.panels, strict=True):
        assert panel.picture is not None
        settled(out.with_suffix(f".{name}.svg"), alone(panel.picture).encode())


def _show(sheet: Sheet, json: bool) -> None:
    if json:
        from isles.report.sheet import as_json

        print(as_json(sheet))
        return
    from isles.cli.table import print_table

    print(sheet.title, sheet.subtitle, sheet.what, "", sep="\n")
    print_table(sheet.table)
    print()
    for note in sheet.notes:
        print(f"note: {note}")


def _plan_of(run: Path) -> str:
    """The file that the run's configuration names. ValueError for a run without a plan."""
    from isles.tables import read_toml
    from isles.training.config.kept import beside

    if not (run / "config.toml").is_file():
        raise ValueError(f"{run}: no config.toml there; name the directory of a run")
    tables = read_toml(str(run / "config.toml"))
    beside(tables, run)
    table = tables.get("pipeline", {})
    name = table.get("plan") if isinstance(table, dict) else None
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
