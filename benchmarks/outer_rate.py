"""Loss over outer rates and outer momenta: the tables and the picture of docs/outer-rate.md.

    python -m benchmarks.outer_rate [--methods diloco,eager,...] [--seeds 1000,1001] [--at-once 2] [--write]

The comparison's long job, shortened to STEPS, on the seeds and the text of its searches: no judged run is touched. A
rate is given as the outer step, outer_lr / (1 - outer_momentum). Every run is a line of outer_rate.jsonl as soon as it
has ended, and is not made again. Workers that never talk are the line that a rate must stay below.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks._pages import DOCS, written
from benchmarks.comparison.cases import REGIMES
from benchmarks.comparison.runs import Printed, append
from benchmarks.comparison.text import table
from benchmarks.comparison.tuning import SEED, training_text
from isles.cli.several.rows import names
from isles.cli.several.running import seeds_of
from isles.experts.jobs import JobProgress
from isles.experts.tasks import ExpertTask, carry_out
from isles.report.comparison import NEVER
from isles.report.draw.png import picture
from isles.report.draw.style import SERIES
from isles.report.paired import judged
from isles.report.panels import Chart, Panel, Polyline
from isles.training.config.reading import read_config
from isles.training.records.finite import NotFinite
from isles.training.running.run import launch

FILE = Path(__file__).with_suffix(".jsonl")
PAGE, PICTURE = "outer-rate.md", "outer-rate.png"
METHODS = ("diloco", "noloco", "streaming-diloco", "eager", "delayed")
OUTER_STEPS, MOMENTA, STEPS = (0.25, 0.5, 1.0, 2.0, 4.0), (0.0, 0.5, 0.8), 480
Point = tuple[str, float, float]
"""Method, outer step, outer momentum."""


def main(words: Sequence[str]) -> int:
    """Make what is missing, and the page. words: of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outer_rate")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default=f"{SEED},{SEED + 1}")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"put tables and picture into docs/{PAGE}")
    asked = parser.parse_args(words)
    points: list[Point] = [(NEVER, 0.0, 0.0), *product(names(asked.methods, "--methods"), OUTER_STEPS, MOMENTA)]
    wanted = [(seed, point) for seed in seeds_of(asked.seeds) for point in points]
    left = [one for one in wanted if one not in _known()]
    with TemporaryDirectory() as folder:
        progress = Printed(len(left))
        tasks = [
            ExpertTask(name=f"{seed}, {point}", work=partial(_run, seed, point, Path(folder))) for seed, point in left
        ]
        carry_out(tasks, asked.at_once, progress)
    losses = _means()
    shown = [method for method in METHODS if any(point[0] == method for point in losses)]
    text = "\n\n".join(f"`{method}`\n\n{_table(method, losses)}" for method in shown)
    print(text)
    if asked.write:
        seeds = ", ".join(map(str, sorted({seed for seed, _ in _known()})))
        written(
            PAGE,
            "benchmarks.outer_rate",
            f"Seeds {seeds}.\n\n{text}\n\n![loss against the outer step](pictures/{PICTURE})",
        )
        drawn = picture("Validation loss against the outer step", _BELOW, [_panel(one, losses) for one in shown])
        (DOCS / "pictures" / PICTURE).write_bytes(drawn)
    return 0


_BELOW = "outer_lr / (1 - outer_momentum); dashed: workers that never talk, the mean of their own losses"


def _run(seed: int, point: Point, folder: Path, progress: JobProgress) -> None:
    method, step, momentum = point
    flags: dict[str, Any] = {"replicas.method": method, "run.seed": seed, "world.backend": "virtual"}
    flags |= REGIMES["long"] | {"model.device": "cpu", "run.steps": STEPS, "run.validate_every": 0}
    flags["inner.warmup_steps"] = STEPS // 15
    if method == NEVER:
        del flags["replicas.sync_every"]
    else:
        flags |= {"replicas.outer_lr": step * (1 - momentum), "replicas.outer_momentum": momentum}
    base = read_config(None, flags, [], shared=True)
    flags["data.path"] = str(training_text(base.data, folder / "text.txt"))
    place = folder / f"{seed}-{method}-{step}-{momentum}"
    config = read_config(None, flags, [], shared=True)
    try:
        loss = judged(launch(config, place, lambda line: None, lambda notice: None))
    except NotFinite:
        loss = None
    append(FILE, {"seed": seed, "method": method, "step": step, "momentum": momentum, "loss": loss})
    progress.end(f"{seed}, {point}: {loss}")


def _known() -> dict[tuple[int, Point], float | None]:
    lines = FILE.read_text(encoding="utf-8").splitlines() if FILE.exists() else []
    return {(one["seed"], (one["method"], one["step"], one["momentum"])): one["loss"] for one in map(json.loads, lines)}


def _means() -> dict[Point, float]:
    """Over the seeds; without points whose numbers are not finite on one of them."""
    found: dict[Point, list[float | None]] = {}
    for (_, point), loss in _known().items():
        found.setdefault(point, []).append(loss)
    return {point: mean(losses) for point, losses in found.items() if None not in losses}  # type: ignore[type-var]


def _table(method: str, losses: dict[Point, float]) -> str:
    best = min(loss for point, loss in losses.items() if point[0] == method)

    def cell(step: float, momentum: float) -> str:
        loss = losses.get((method, step, momentum))
        if loss is None:
            return "-"
        return f"**{loss:.3f}**" if loss == best else f"{loss:.3f}"

    heads = ["outer momentum", *(f"outer step {step:g}" for step in OUTER_STEPS)]
    return table(heads, [[f"{m:g}", *(cell(step, m) for step in OUTER_STEPS)] for m in MOMENTA])


def _panel(method: str, losses: dict[Point, float]) -> Panel:
    lines, keys = list[Polyline](), list[tuple[str, str]]()
    for momentum, css in zip(MOMENTA, SERIES, strict=False):
        found = [(step, losses[method, step, momentum]) for step in OUTER_STEPS if (method, step, momentum) in losses]
        lines.append(Polyline(points=found, css=css))
        keys.append((css, f"momentum {momentum:g}"))
    never = losses[NEVER, 0.0, 0.0]
    lines.append(Polyline(points=[(OUTER_STEPS[0], never), (OUTER_STEPS[-1], never)], css="ddp"))
    chart = Chart(title=method, x_label="outer step", lines=lines, log_x=True, top=never + 0.15)
    return Panel(heading=method, picture=chart, keys=[*keys, ("ddp", "never talk")])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
