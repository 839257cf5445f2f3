"""Loss over outer rates and outer momenta, and what the best of them are worth: docs/outer-rate.md.

    python -m benchmarks.outer_rate [--methods diloco,eager,...] [--write]
    python -m benchmarks.outer_rate --judge [--write]      once outer_rate.jsonl is committed

The first moves the outer step, outer_lr / (1 - outer_momentum), and the momentum of a small model's job, on a seed and
on text that no judged run has (`benchmarks._once`). Every run is a line of outer_rate.jsonl. Workers that never talk
are the line that a rate must stay below.

--judge: `eager` and `delayed` on the embedded run with H = 10 and 400 steps, with the rates of the embedded table and
with those that did best above, beside workers that never talk; seeds 0, 1, 2, each run once.

Bound: `eager` gains 0.08 nats a token or more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from benchmarks._measure import Row, report
from benchmarks._once import Found, judging, tuning
from benchmarks._pages import DOCS, written
from benchmarks.comparison.text import table
from isles.cli.several import names
from isles.report.comparison import NEVER, Paired, paired
from isles.report.draw.png import picture
from isles.report.draw.style import SERIES
from isles.report.panels import Chart, Panel, Polyline
from isles.training.config.reading import read_config
from isles.training.config.sections import Config

PAGE, PICTURE = "outer-rate.md", "outer-rate.png"
FILE = DOCS.parent / "benchmarks" / "outer_rate.jsonl"
METHODS = ("diloco", "noloco", "streaming-diloco", "eager", "delayed")
OUTER_STEPS, MOMENTA = (0.25, 0.5, 1.0, 2.0), (0.0, 0.5, 0.8)
Point = tuple[float, float]
"""Outer step, outer momentum."""
JOB: Mapping[str, Any] = {
    "world.backend": "virtual",
    "model.device": "cpu",
    "run.steps": 400,
    "run.validate_every": 0,
    "inner.warmup_steps": 40,
}
SMALL = {"model.d_model": 32, "model.ffn": 96, "model.context": 64, "data.batch_size": 4}
EVERY, SEEDS = 10, (0, 1, 2)
JUDGED, BOUND, OLD = ("eager", "delayed"), 0.08, "as the embedded table had it"


def configured(method: str, point: Point | None, more: Mapping[str, Any]) -> Config:
    """JOB with a method; point: None for the rates of the embedded table."""
    flags: dict[str, Any] = {**JOB, **more, "replicas.method": method}
    if method != NEVER:
        flags["replicas.sync_every"] = EVERY
    if point is not None:
        step, momentum = point
        flags |= {"replicas.outer_lr": round(step * (1 - momentum), 12), "replicas.outer_momentum": momentum}
    return read_config(None, flags, [], shared=True)


def study(methods: Sequence[str]) -> dict[tuple[str, Point | None], float]:
    """Losses by method and point; without those whose numbers did not stay finite."""
    wanted: list[tuple[str, Point | None]] = [(NEVER, None), *product(methods, product(OUTER_STEPS, MOMENTA))]
    found = {}
    for method, point in wanted:
        one = tuning(PAGE, f"{method} {point or ''}".strip(), configured(method, point, SMALL), file=FILE)
        if one["loss"] is not None:
            found[method, point] = one["loss"]
    return found


def best_point(method: str, losses: Mapping[tuple[str, Point | None], float]) -> Point:
    """With the least loss."""
    own = {point: loss for (name, point), loss in losses.items() if name == method and point is not None}
    return min(own, key=own.__getitem__)


def judged_rows(losses: Mapping[tuple[str, Point | None], float]) -> dict[str, list[Found]]:
    """By row, a line for each seed."""
    points: dict[str, tuple[str, Point | None]] = {"workers that never talk": (NEVER, None)}
    for method in JUDGED:
        points[f"`{method}`, as the study found"] = (method, best_point(method, losses))
        points[f"`{method}`, {OLD}"] = (method, (0.4, 0.5))
    return {
        row: [judging(PAGE, row, configured(*point, {"run.seed": seed}), settings=FILE) for seed in SEEDS]
        for row, point in points.items()
    }


def ahead(rows: Mapping[str, list[Found]], row: str, other: str) -> Paired:
    """Loss of `other` less that of `row`, seed by seed."""
    return paired([theirs["loss"] - mine["loss"] for mine, theirs in zip(rows[row], rows[other], strict=True)])


def judged_table(losses: Mapping[tuple[str, Point | None], float], rows: Mapping[str, list[Found]]) -> str:
    """For the page."""
    made = []
    never = next(iter(rows))
    for row, own in rows.items():
        method = row.split("`")[1] if "`" in row else ""
        step, momentum = (0.4, 0.5) if OLD in row else best_point(method, losses) if method else (0.0, 0.0)
        gained = None if row == never else ahead(rows, row, never)
        made.append(
            [
                row,
                f"{step * (1 - momentum):g} / {momentum:g}" if method else "-",
                f"{sum(one['loss'] for one in own) / len(own):.3f}",
                ", ".join(f"{one['loss']:.3f}" for one in own),
                "-" if gained is None else f"{gained.mean:+.3f} ± {gained.half:.3f}",
            ]
        )
    seeds = f"seeds {', '.join(map(str, SEEDS))}"
    return table(["row", "outer rate / momentum", "loss", seeds, "ahead of workers that never talk"], made, names=2)


def study_tables(losses: Mapping[tuple[str, Point | None], float]) -> str:
    """One a method, for the page."""
    shown = [method for method in METHODS if any(name == method for name, _ in losses)]
    parts = [f"`{method}`:\n\n{_table(method, losses)}" for method in shown]
    return f"Workers that never talk, the mean of their own losses: {losses[NEVER, None]:.3f}.\n\n" + "\n\n".join(parts)


def _table(method: str, losses: Mapping[tuple[str, Point | None], float]) -> str:
    best = best_point(method, losses)

    def cell(point: Point) -> str:
        loss = losses.get((method, point))
        if loss is None:
            return "-"
        return f"**{loss:.3f}**" if point == best else f"{loss:.3f}"

    heads = ["outer momentum", *(f"outer step {step:g}" for step in OUTER_STEPS)]
    return table(heads, [[f"{m:g}", *(cell((step, m)) for step in OUTER_STEPS)] for m in MOMENTA])


def _panel(method: str, losses: Mapping[tuple[str, Point | None], float]) -> Panel:
    drawn, keys = list[Polyline](), list[tuple[str, str]]()
    for momentum, css in zip(MOMENTA, SERIES, strict=False):
        points = [(step, losses.get((method, (step, momentum)))) for step in OUTER_STEPS]
        drawn.append(Polyline(points=[(step, loss) for step, loss in points if loss is not None], css=css))
        keys.append((css, f"momentum {momentum:g}"))
    never = losses[NEVER, None]
    drawn.append(Polyline(points=[(OUTER_STEPS[0], never), (OUTER_STEPS[-1], never)], css="ddp"))
    chart = Chart(title=method, x_label="outer step", lines=drawn, log_x=True, top=never + 0.15)
    return Panel(heading=method, picture=chart, keys=[*keys, ("ddp", "never talk")])


_BELOW = "outer_lr / (1 - outer_momentum); dashed: workers that never talk, the mean of their own losses"


def main(words: Sequence[str]) -> int:
    """Make what is missing, and the page. words: of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outer_rate")
    parser.add_argument("--methods", default="diloco,eager,delayed", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--judge", action="store_true", help="the embedded run on judged seeds")
    parser.add_argument("--write", action="store_true", help=f"put tables and picture into docs/{PAGE}")
    asked = parser.parse_args(words)
    losses = study(names(asked.methods, "--methods"))
    if not asked.judge:
        print(study_tables(losses))
        if asked.write:
            text = f"{study_tables(losses)}\n\n![loss against the outer step](pictures/{PICTURE})"
            written(PAGE, "benchmarks.outer_rate", text)
            shown = [_panel(method, losses) for method in METHODS if any(name == method for name, _ in losses)]
            drawn = picture("Validation loss against the outer step", _BELOW, shown)
            (DOCS / "pictures" / PICTURE).write_bytes(drawn)
        return 0
    rows = judged_rows(losses)
    print(judged_table(losses, rows))
    if asked.write:
        written(PAGE, "benchmarks.outer_rate --judge", judged_table(losses, rows))
    made = []
    for method in JUDGED:
        new, old = (row for row in rows if f"`{method}`" in row)
        gained = ahead(rows, new, old)
        bound = (">=", BOUND) if method == "eager" else None
        made.append(Row(f"{method} gains", gained.mean, "nats", bound, f"+- {gained.half:.3f}"))
    return report(made, as_json=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
