"""`isles plan paths`: the way of each microbatch of a step where some stages are left out and others exchanged;
`isles plan check`: is such a plan legal? `isles plan replan`: a new one for the speeds that a run measured. Never loads
torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isles.base.tables import read_toml
from isles.cli.terminal import AsJson, print_table, show
from isles.report import settled
from isles.report.draw.svg import alone
from isles.report.panels import Table

if TYPE_CHECKING:
    from isles.network.routing.problem import RoutingCosts
    from isles.network.routing.replay import Sizes
    from isles.network.routing.search import Stages
    from isles.report.sheet import Sheet


def plan_paths(
    links: Annotated[str, typer.Argument(metavar="LINKS", help="Network between the nodes: a .toml file or a preset.")],
    stages: Annotated[
        str, typer.Option(help="Nodes of each stage: how many, such as 5,3,3; or which, such as 0,1/2,3/4,5.")
    ],
    out: Annotated[Path, typer.Option(help="Write the plan here, and its pictures beside it.")],
    message: Annotated[
        str, typer.Option(help="What a microbatch sends to a stage: 33.5MB, or TOKENSxWIDTH as 8kx4096; 33.5MB+350ms.")
    ],
    task: Annotated[
        str, typer.Option(help="A forward at each node: 440ms; 0.4s,0.4s,1.6s; or '1.2T on A100-40,RTX 3060*4'.")
    ],
    costs: Annotated[
        str, typer.Option(help="Backward, and loss with head, as multiples of the forward.")
    ] = "backward=1.5,loss=0.25",
    boundary: Annotated[str | None, typer.Option(help="With TOKENSxWIDTH: what crosses, such as dct:0.9.")] = None,
    boundary_codec: Annotated[str | None, typer.Option(help="With TOKENSxWIDTH: its form, such as int8.")] = None,
    path_length: Annotated[
        str | None, typer.Option(help="Stages that a microbatch runs, such as 4 or 67%. Default: all.")
    ] = None,
    microbatches: Annotated[
        str, typer.Option(help="Of an origin's step: as many as a node holds at once x waves of them.")
    ] = "3x2",
    cut: Annotated[str | None, typer.Option(help="First block of each stage but the first, such as 4,8.")] = None,
    budget: Annotated[str, typer.Option(help="Stop the search after this time.")] = "60s",
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
    json: AsJson = False,
) -> None:
    """Find paths for microbatches that leave out stages and exchange them (SkipPipe): seconds of a step by strategy."""
    from isles.network.links import links as named
    from isles.network.routing.plan import PipelinePlan, as_json, delays_of, fingerprint, forward_seconds, plan_network
    from isles.network.routing.problem import RoutingProblem
    from isles.network.routing.search import SearchEffort, assign, routing_strategies
    from isles.report.sheet import pipeline_sheet

    check_out(out)
    seconds = search_seconds(budget)
    in_memory, waves = _product("--microbatches", microbatches)
    messages, overhead = message_sizes(message, boundary, boundary_codec)
    network, multiples = named(links), _costs(costs)
    sizes, listed = _stages(stages)
    times = forward_seconds(sum(sizes), task)
    delays = delays_of(network, len(times), messages.forward, overhead)
    nodes_by_stage = listed or assign(sizes, delays, times, seed=seed, seconds=0.3 * seconds)
    problem = RoutingProblem(
        stages=nodes_by_stage,
        delays=delays,
        forward=times,
        path_length=_length(path_length, stages=len(nodes_by_stage)),
        memory=in_memory,
        waves=waves,
        costs=multiples,
    )
    cuts = None if cut is None else _cuts(cut, len(problem.stages))
    lines = plan_network(network, problem.nodes, messages, overhead)
    found = routing_strategies(problem, SearchEffort(seconds=0.6 * seconds), seed, lines)
    paths = found[-1].paths
    assert paths is not None
    made = PipelinePlan(
        problem=problem, paths=paths, links=fingerprint(network, problem.nodes), cuts=cuts, network=lines
    )
    sheet = pipeline_sheet(problem, found, messages, links)
    _write(out, as_json(made), sheet)
    show(sheet, json, None)
    print(out, file=sys.stderr if json else sys.stdout)


def check_out(out: Path | None) -> None:
    """ValueError for what would else be found when the search is over."""
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        mend = "is a directory; name a file" if out.is_dir() else f"{out.parent} is no directory; make it first"
        raise ValueError(f"--out {out}: {mend}")


def search_seconds(budget: str) -> float:
    """Of --budget. ValueError for none."""
    from isles.network.units import parse_latency

    seconds = parse_latency("--budget", budget)
    if not seconds > 0:
        raise ValueError(f"--budget {budget}: choose a time above 0, such as 60s")
    return seconds


def message_sizes(text: str, boundary: str | None, codec: str | None) -> tuple[Sizes, float]:
    """(bytes of the messages, seconds of each beside its line) of --message. ValueError for what is none."""
    from isles.network.routing.replay import Sizes
    from isles.network.units import parse_count, parse_latency, parse_sized_bytes
    from isles.pipeline.boundaries.names import boundary_name

    size, _, more = text.partition("+")
    overhead = parse_latency("--message", more.strip()) if more.strip() else 0.0
    tokens, times, width = size.strip().partition("x")
    if not times:
        if boundary or codec:
            raise ValueError(
                f"--message {text}: with --boundary or --boundary-codec write TOKENSxWIDTH, such as 8kx4096"
            )
        nbytes = round(parse_sized_bytes("--message", size.strip()))
        if nbytes < 1:
            raise ValueError(f"--message {text}: choose bytes above 0, such as 33.5MB")
        return Sizes(forward=nbytes, home=nbytes, backward=nbytes), overhead
    if not width.strip().isdigit() or int(width) < 1:
        raise ValueError(f"--message {text}: write TOKENSxWIDTH, such as 8kx4096")
    settings = {"kind": boundary or "none", "codec": codec or "none", "gradient_codec": codec or "none"}
    if boundary_name(settings["kind"]).is_one_way:
        raise ValueError(
            f"--boundary {boundary}: with a plan the loss is computed at the origin, and what leaves the last visit "
            "does not fit through; choose dct:0.75"
        )
    from isles.plan.replicas import message_sizes as sizes_of  # which loads torch

    return sizes_of(round(parse_count("--message", tokens.strip())), int(width), settings), overhead


def _costs(text: str) -> RoutingCosts:
    from isles.network.routing.problem import RoutingCosts

    made = RoutingCosts()
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if name not in ("backward", "loss") or not number >= 0:
            raise ValueError(f"--costs {text}: write multiples of a forward's time, such as backward=1.5,loss=0.25")
        made = replace(made, backward=number) if name == "backward" else replace(made, loss=number)
    return made


def _product(option: str, text: str) -> tuple[int, int]:
    in_memory, _, waves = text.partition("x")
    if not (in_memory.strip().isdigit() and waves.strip().isdigit() and int(in_memory) and int(waves)):
        raise ValueError(f"{option} {text}: write how many a node holds x waves of them, such as 3x2")
    return int(in_memory), int(waves)


def _stages(parts: str) -> tuple[list[int], Stages | None]:
    """(nodes of each stage, which they are where that is said)."""
    if "/" not in parts:
        return _numbers("--stages", parts, 1), None
    listed = tuple(tuple(_numbers("--stages", part, 0)) for part in parts.split("/"))
    return [len(part) for part in listed], listed


def _length(text: str | None, *, stages: int) -> int:
    """Of --path-length: a number of stages, or a share of them."""
    if text is None:
        return stages
    number = text.removesuffix("%")
    try:
        value = float(number) if text.endswith("%") else int(number)
    except ValueError:
        value = 0
    if value <= 0 or (text.endswith("%") and value > 100):
        raise ValueError(f"--path-length {text}: write a number of stages, such as 4, or a share of them, such as 67%")
    return max(1, round(stages * value / 100)) if text.endswith("%") else int(value)


def _cuts(text: str, stages: int) -> tuple[int, ...]:
    cuts = tuple(_numbers("--cut", text, 1))
    if len(cuts) != stages - 1 or list(cuts) != sorted(set(cuts)):
        raise ValueError(
            f"--cut {text}: give {stages - 1} growing numbers, the first block of each stage but the first"
        )
    return cuts


def _numbers(option: str, text: str, least: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise ValueError(f"{option} {text}: write whole numbers from {least} with commas between, such as 5,3,3")
    return numbers


def _write(out: Path, text: str, sheet: Sheet) -> None:
    """The plan, and beside it the sheet's pictures: one PNG of all, an SVG of each."""
    from isles.report.draw.png import picture

    settled(out, text.encode())
    settled(out.with_suffix(".png"), picture(sheet.title, sheet.subtitle, sheet.panels, sheet.table))
    for name, panel in zip(("steps", "ways"), sheet.panels, strict=True):
        assert panel.picture is not None
        settled(out.with_suffix(f".{name}.svg"), alone(panel.picture).encode())


def check(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan's JSON file.")],
    links: Annotated[str | None, typer.Option(help="Also refuse it unless it was made for this network.")] = None,
) -> None:
    """Check a plan of paths: print every rule that it breaks; exit code 2 if there is one."""
    from isles.network.links import links as named
    from isles.network.routing.plan import complaints, fingerprint, read_unchecked
    from isles.network.routing.problem import lower_bounds

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
    from isles.network.routing.events import visited
    from isles.network.routing.plan import as_json, planned_computing, read_plan, speed_factors
    from isles.network.routing.search import SearchEffort, with_collisions, without_collisions

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
