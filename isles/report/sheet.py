"""What a calculation has to show, before it is printed or written: a table, pictures, notes and the same for machines.

sheet -> NAME.csv (the table), NAME.json (`data`), NAME.png and NAME.html (table, pictures, notes)

The sheet of `isles plan paths` stands here too: seconds of a step by strategy, when each node does what, which paths
are used. Loads no torch.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from isles.base.schema import TASK_KINDS
from isles.network.routing.plan import slips
from isles.network.routing.problem import Paths, RoutingProblem, lower_bounds, replay_paths
from isles.network.routing.replay import Replay, Sizes
from isles.network.routing.search import RoutingStrategy
from isles.report import settled
from isles.report.charts import TASK_KEYS, TASK_LOOKS
from isles.report.page import document, section, wide_table
from isles.report.panels import Grid, Lane, Lanes, LaneSegment, Panel, Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """name: of the files. table: numbers without units (those stand in the heads). what: a line about them. notes: what
    a reader must know to use the numbers. data: for machines.
    """

    name: str
    title: str
    subtitle: str
    table: Table
    what: str
    data: Mapping[str, Any]
    panels: Sequence[Panel] = ()
    notes: Sequence[str] = ()


def as_json(sheet: Sheet) -> str:
    """`data` as text that any JSON parser takes (no NaN)."""
    return json.dumps(sheet.data, indent=1, allow_nan=False)


def write_sheet(sheet: Sheet, folder: Path) -> list[Path]:
    """Write all four files into `folder`, which is made if it is absent. ValueError where it cannot be made."""
    from isles.report.draw.png import picture

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be made ({error.strerror}); name another directory with --out") from error
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([sheet.table.heads, *sheet.table.rows])
    body = "".join(f'<p class="note">{escape(note)}</p>' for note in sheet.notes)
    body += "".join(map(section, sheet.panels)) + wide_table("Table", sheet.what, sheet.table)
    files = {
        "csv": table.getvalue().encode(),
        "json": (as_json(sheet) + "\n").encode(),
        "png": picture(sheet.title, sheet.subtitle, sheet.panels, sheet.table),
        "html": document(sheet.title, sheet.subtitle, body).encode(),
    }
    return [settled(folder / f"{sheet.name}.{ending}", data) for ending, data in files.items()]


WHAT = {
    "full": "fixed pipelines, all stages",
    "random": "blind to the network",
    "without": "each path fast alone",
    "with": "collisions counted",
}


def pipeline_sheet(problem: RoutingProblem, found: Sequence[RoutingStrategy], sizes: Sizes, network: str) -> Sheet:
    """`found` as `routing_strategies` gives them, the plan last. sizes: of messages. network: its name in words."""
    plan, whole = found[-1], found[0]
    assert plan.paths is not None
    bounds = lower_bounds(problem)
    bound, name = max((seconds, name) for name, seconds in bounds.items())
    step = plan.seconds
    return Sheet(
        name="pipeline",
        title=f"{problem.nodes} nodes in {len(problem.stages)} stages, {network}",
        subtitle=f"{problem.microbatches} microbatches a step, {problem.path_length} stages each; {step:.4g} s",
        what="The same number of microbatches with each strategy, replayed event by event; messages share their lines.",
        table=Table(
            heads=["strategy", "what it is", "step s", "of full", "idle %", "sent GB", "planned in s"],
            rows=[_strategy_row(problem, one, whole, sizes) for one in found],
            names=2,
        ),
        data={
            "network": network,
            "lower_bounds_seconds": bounds,
            "strategies": [
                {
                    "name": one.name,
                    "step_seconds": one.seconds,
                    "bytes_sent_by_node": [one.sent(sizes)[node] for node in range(problem.nodes)],
                    "bubble_by_node": [one.played.bubbles.get(node, 1.0) for node in range(problem.nodes)],
                }
                for one in found
            ],
        },
        panels=[gantt(problem, plan.played), way_map(problem, plan.paths)],
        notes=[
            f"No plan takes less than {bound:.4g} s ({name}); this one takes {step / bound:.4g} times that.",
            _share(problem, whole.seconds, step),
            *_crowded(step, replay_paths(problem, plan.paths).makespan),
            *slips(problem.delays)[:3],
        ],
    )


def gantt(problem: RoutingProblem, played: Replay) -> Panel:
    """Every node's tasks."""
    lanes = [
        Lane(
            label=f"{node} stage {problem.stage_of[node]}",
            segments=[
                LaneSegment(
                    start=span.start,
                    end=span.end,
                    css=TASK_LOOKS[TASK_KINDS[span.task.kind]],
                    row=0,
                    hint=f"microbatch {span.task.microbatch}, hop {span.task.hop}",
                    mark=str(span.task.microbatch),
                )
                for span in played.spans
                if span.worker == node
            ],
        )
        for stage in problem.stages
        for node in stage
    ]
    picture = Lanes(title="What each node does", x_label="seconds", start=0.0, end=played.makespan, lanes=lanes)
    return Panel(heading="A step, node by node", picture=picture, keys=TASK_KEYS)


def way_map(problem: RoutingProblem, paths: Paths) -> Panel:
    """Seconds between every two nodes, stage by stage, and the ways that the plan uses."""
    nodes = [node for stage in problem.stages for node in stage]
    position = {node: number for number, node in enumerate(nodes)}
    delays_between = [problem.delays[u][v] for u in nodes for v in nodes if u != v and problem.delays[u][v] > 0]
    low, high = (math.log(min(delays_between)), math.log(max(delays_between))) if delays_between else (0.0, 0.0)

    def shade(u: int, v: int) -> float | None:
        if u == v or problem.delays[u][v] <= 0:
            return None
        return (math.log(problem.delays[u][v]) - low) / (high - low) if high > low else 0.5

    used = {
        (position[one], position[other])
        for path in paths.values()
        for one, other in zip(path, (*path[1:], path[0]), strict=True)
        if one != other
    }
    picture = Grid(
        title="Ways between nodes",
        labels=[f"{node} stage {problem.stage_of[node]}" for node in nodes],
        shades=[[shade(u, v) for v in nodes] for u in nodes],
        hints=[[f"{u} to {v}: {problem.delays[u][v]:.3g} s" for v in nodes] for u in nodes],
        marks=used,
    )
    note = "From the row's node to the column's: the darker, the longer; a dot: forwards of the plan go there."
    return Panel(heading="Ways between nodes", picture=picture, notes=[note])


def _strategy_row(problem: RoutingProblem, one: RoutingStrategy, whole: RoutingStrategy, sizes: Sizes) -> list[str]:
    idle = 1 - sum(one.played.busy.values()) / (problem.nodes * one.played.makespan)
    return [
        one.name,
        WHAT[one.name],
        f"{one.seconds:.4g}",
        f"{one.seconds / whole.seconds:.2f}",
        f"{100 * idle:.1f}",
        f"{sum(one.sent(sizes).values()) / 1e9:.4g}",
        f"{one.planning:.1f}",
    ]


def _share(problem: RoutingProblem, full: float, step: float) -> str:
    """How much of what is saved comes from leaving stages out."""
    fewer = problem.path_length / len(problem.stages)
    sentence = f"The plan's step is {100 * (1 - step / full):.0f} % shorter than the full pipelines'"
    if fewer == 1:
        return f"{sentence}; no stage is left out."
    return f"{sentence}; {100 * (1 - fewer):.0f} % fewer stages alone would make it {fewer * full:.4g} s."


def _crowded(step: float, alone: float) -> list[str]:
    """What shared lines cost."""
    if math.isclose(step, alone, rel_tol=1e-6):
        return []
    return [f"In all seconds messages share their lines; were each alone, the plan's step would take {alone:.4g} s."]
