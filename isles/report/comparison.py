"""Pages of several runs: of a comparison (one table, and losses on common axes against steps, bytes and time) and of a
search for settings.

Which row is ahead is decided from runs of the same seeds: paired differences, their intervals, Holm's correction. A
seed gives all rows the same weights to begin with and the same data in the same order, so losses are subtracted seed
by seed. d: the n differences of two rows.

    interval   mean d -+ t_{0.975, n-1} s / sqrt(n)          s: standard deviation of d
    p          two-sided, of t = mean d / (s / sqrt(n))
    Holm       the k-th smallest of m claims' p, times m - k + 1, and no smaller than the one before

The page of `isles tune` shows the trials, how the best came about, loss against each setting, what mattered.

OUT/tune.json -> OUT/report.html

    {"method", "at", "seed", "config", "trials": [{"index", "state", "loss", "steps", "of", "settings", "params"}],
     "importances": {name: share}}

state: complete, pruned (stopped at a rung, or its numbers were not finite), running. steps: done, of so many.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from isles.base.parsing import parse_json
from isles.report.charts import MEAN_POINTS, CostAxis, by_bytes, by_clock, by_step, lanes_panel, loss_against
from isles.report.draw.style import SERIES
from isles.report.page import Report, document, section, wide_table
from isles.report.panels import Chart, Panel, Polyline, Table, average, chart_panel, plain
from isles.report.rundir import RunFiles, read_run
from isles.report.units import format_bytes, format_number, format_percent, format_seconds, format_seeds, time_unit

CLAIMS = (
    "Validation loss of the second less the first's, seed by seed (never talk: the workers' own losses): above 0, the "
    "first is ahead. 95 % intervals (Student's t); p after Holm's correction over all lines, ahead below 0.05."
)
_LEVEL = 0.05
Summaries = Mapping[str, Sequence[Mapping[str, Any]]]


class Paired(NamedTuple):
    """Differences of two rows: their mean, half the width of its 95 % interval, p of no difference."""

    mean: float
    half: float
    p: float


def paired(differences: Sequence[float]) -> Paired:
    """Of two differences or more."""
    from scipy.special import stdtr, stdtrit

    n = len(differences)
    mean = math.fsum(differences) / n
    error = math.sqrt(math.fsum((one - mean) ** 2 for one in differences) / (n - 1) / n)
    if error == 0:
        return Paired(mean, 0.0, 0.0 if mean else 1.0)
    return Paired(mean, float(stdtrit(n - 1, 0.975)) * error, float(2 * stdtr(n - 1, -abs(mean) / error)))


def holm(ps: Sequence[float]) -> list[float]:
    """The p values, corrected for there being several, in their order."""
    found, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda index: ps[index])):
        largest = max(largest, min(1.0, ps[index] * (len(ps) - rank)))
        found[index] = largest
    return found


def never_talks(summary: Mapping[str, Any]) -> bool:
    """Whether the run is of workers that never exchange anything: the mean of their weights is no model of use."""
    return summary.get("method") == "none" and summary.get("workers", 1) > 1


def validation_loss_of(summary: Mapping[str, Any]) -> float | None:
    """The validation loss that runs are compared by."""
    return summary.get("val_loss_replicas" if never_talks(summary) else "val_loss")


def claims_table(summaries: Summaries) -> Table:
    """Every two rows that have two seeds or more in common; none where no two have."""
    losses = {
        label: {one["seed"]: loss for one in group if (loss := validation_loss_of(one)) is not None}
        for label, group in summaries.items()
    }
    seeds = {(a, b): sorted(losses[a].keys() & losses[b].keys()) for a, b in combinations(losses, 2)}
    pairs = [pair for pair, common in seeds.items() if len(common) > 1]
    found = [paired([losses[b][seed] - losses[a][seed] for seed in seeds[a, b]]) for a, b in pairs]
    rows = []
    for (first, second), one, p in zip(pairs, found, holm([one.p for one in found]), strict=True):
        verdict = "open" if p >= _LEVEL else first if one.mean > 0 else second
        interval = f"{one.mean - one.half:+.4f} to {one.mean + one.half:+.4f}"
        rows.append([first, second, f"{one.mean:+.4f}", interval, f"{p:.3g}", verdict])
    return Table(heads=["first", "second", "difference", "interval", "p", "ahead"], rows=rows, names=2)


LANES = 4
"""Workers of each method whose time is drawn."""
INDEX = "compare.json"
"""In the folder of a comparison: {row: [summary of each seed]}; folder: of a run that lies elsewhere, from there."""
NEVER, ALONE = "none", "one-worker"
"""The rows that all are held against: workers that never talk, and one worker that reads all the tokens."""

# Key of summary.json, head of the column, form.
COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("val_loss", "validation loss", lambda value: f"{value:.4f}"),
    ("val_loss_replicas", "mean of replicas", lambda value: f"{value:.4f}"),
    ("replica_std", "spread of replicas", format_number),
    ("tokens", "tokens", lambda value: f"{value:,.0f}"),
    ("bytes_sent_per_worker", "sent per worker", format_bytes),
    ("priced_bytes_per_worker", "sent as priced", format_bytes),
    ("compute_utilisation", "computing", format_percent),
    ("train_seconds", "training", format_seconds),
    ("virtual_seconds", "virtual time", format_seconds),
)

Runs = dict[str, list[RunFiles]]


def run_folder(method: str, seed: int) -> str:
    """The folder of one run inside that of its comparison."""
    label = re.sub(r"[^\w.+=@-]", ".", method)
    return f"{label}-{seed}"


def read_comparison(folder: Path) -> Runs:
    """The runs of each method in the folder that `isles compare` wrote. ValueError where one is missing."""
    try:
        index = parse_json((folder / INDEX).read_text(encoding="utf-8"))
        arguments = {
            label: [(folder / one.get("folder", run_folder(label, one["seed"])), one) for one in group]
            for label, group in index.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX} is damaged ({error}); run isles compare again") from error
    return {label: [read_run(*one) for one in group] for label, group in arguments.items()}


def comparison_rows(summaries: dict[str, list[dict[str, Any]]]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table: means over each label's runs, losses with their standard deviation over seeds."""
    present = [c for c in COLUMNS if any(s.get(c[0]) is not None for group in summaries.values() for s in group)]
    rows = []
    for label, group in _named(summaries):
        cells = [label]
        for key, _, form in present:
            values = [float(summary[key]) for summary in group if summary.get(key) is not None]
            text = form(math.fsum(values) / len(values)) if values else "-"
            if len(values) > 1 and key.startswith("val_loss"):
                text += f" ± {_deviation(values):.4f}"
            cells.append(text)
        rows.append(cells)
    return ["method", *(head for _, head, _ in present)], rows


def _named(summaries: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Rows as a table has them: workers that never exchange are evaluated each by itself, and by the mean of their
    weights.
    """
    for label, group in summaries.items():
        if group and never_talks(group[0]):
            each = [{**summary, "val_loss": summary.get("val_loss_replicas")} for summary in group]
            yield f"{label} (each worker)", each
            yield f"{label} (mean of their weights)", group
        else:
            yield label + " (all tokens)" * (label == ALONE), group


def title(runs: Runs) -> str:
    """The heading of the page."""
    rows = [label for label in runs if label not in (NEVER, ALONE)]
    title = f"{len(rows)} methods compared" if len(rows) > 1 else f"{rows[0]} compared" if rows else "1 method"
    return title + "".join(dict.fromkeys(run.price for group in runs.values() for run in group))


def comparison_report(runs: Runs) -> Report:
    """Of a comparison, whose table says what its cells are."""
    summaries = {label: [run.summary or {} for run in group] for label, group in runs.items()}
    seeds = max((len(group) for group in runs.values()), default=0)
    what = format_seeds(seeds) + ", ± the standard deviation over them" * (seeds > 1)
    heads, rows = comparison_rows(summaries)
    table, claims = Table(heads=heads, rows=rows), claims_table(summaries)
    body = wide_table("Summary", what, table) + (wide_table("Who is ahead", CLAIMS, claims) if claims.rows else "")
    heading, panels = title(runs), comparison_panels(runs)
    page = document(heading, ", ".join(runs), body + "".join(map(section, panels)))
    return Report(page, heading, what, panels, table)


def comparison_panels(runs: Runs) -> list[Panel]:
    """Training loss of the first seed of each method against steps, bytes and time, one axis for all; and for virtual
    runs, whose clocks can be compared, when the workers of each computed, waited and exchanged.
    """
    first = {label: group[0] for label, group in runs.items() if group}
    clocks = [value for run in first.values() for log in run.workers.values() for value in log.clock.values()]
    unit = time_unit(max(clocks, default=0.0))
    made = [
        _panel(first, by_step, whole_x=True),
        _panel(first, by_bytes, log_x=True),
        _panel(first, lambda run: by_clock(run, unit)),
    ]
    lanes = [(label, lanes_panel(run, LANES)) for label, run in first.items() if run.is_simulated]
    made += [panel and replace(panel, heading=f"Timeline of {label}") for label, panel in lanes]
    return [panel for panel in made if panel is not None]


def _panel(
    runs: dict[str, RunFiles], cost_of: Callable[[RunFiles], CostAxis], *, log_x: bool = False, whole_x: bool = False
) -> Panel | None:
    lines, keys = [], []
    cost = CostAxis("", "", [], plain)
    for index, (label, run) in enumerate(runs.items()):
        cost = cost_of(run)
        points = average(loss_against(run, cost), MEAN_POINTS)
        if points and points[-1][0] > 0:
            css = SERIES[index % len(SERIES)]
            lines.append(Polyline(points=points, css=css, name=f"{label}: {points[-1][1]:.4f} at the end"))
            keys.append((css, label))
    if not lines:
        return None
    chart = Chart(
        title=f"Loss against {cost.noun}",
        x_label=cost.label,
        x_format=cost.form,
        lines=lines,
        # Without the first twentieth, whose fall would press the rest onto the floor.
        top=max(y for line in lines for _, y in (line.points[len(line.points) // 20 :] or line.points)),
        log_x=log_x,
        whole_x=whole_x,
    )
    notes = ["Training loss, mean over the workers, of the first seed.", *["Logarithmic axis."] * log_x]
    return chart_panel(chart, *notes, keys=keys)


def _deviation(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


TUNED = "tune.json"
TuningStudy = Mapping[str, Any]
_SHOWN = 20  # trials of the table


def read_tuning(folder: Path) -> dict[str, Any]:
    """OUT/tune.json."""
    return parse_json((folder / TUNED).read_text(encoding="utf-8"))


def complete(study: TuningStudy) -> list[dict[str, Any]]:
    """Trials that came to their end, the best first."""
    return sorted((one for one in study["trials"] if one["state"] == "complete"), key=lambda one: one["loss"])


def saved(study: TuningStudy) -> float:
    """Share of all trials' steps that pruning saved."""
    ended = [one for one in study["trials"] if one["state"] != "running"]
    return 1 - sum(one["steps"] for one in ended) / max(sum(one["of"] for one in ended), 1)


def subtitle(study: TuningStudy) -> str:
    """What was searched for, and what it took."""
    share = format_percent(saved(study))
    return f"validation loss at equal {study['at']}, seed {study['seed']}; pruning saved {share} of the steps"


def trials_table(study: TuningStudy) -> Table:
    """The best trials, the configuration's own settings (trial 0) too."""
    ranked = complete(study)
    shown = [one for index, one in enumerate(ranked) if index < _SHOWN or one["index"] == 0]
    keys = list(dict.fromkeys(key for one in study["trials"] for key in one["settings"]))
    rows = [
        [str(one["index"]), f"{one['loss']:.4f}", f"{one['of']:,}", *(str(one["settings"].get(k, "-")) for k in keys)]
        for one in shown
    ]
    return Table(heads=["trial", "validation loss", "steps", *keys], rows=rows)


def pictures(study: TuningStudy) -> list[Panel]:
    """The history, and a slice for each parameter."""
    ended = complete(study)
    if not ended:
        return []
    history = sorted((one["index"], one["loss"]) for one in ended)
    best = [(index, min(loss for _, loss in history[: count + 1])) for count, (index, _) in enumerate(history)]
    lines = [Polyline(points=best, css="mean", name="the best so far")]
    chart = Chart(title="Loss by trial", x_label="trial", lines=lines, dots=history, whole_x=True)
    panels = [Panel(heading="History", picture=chart, notes=["Trials that were pruned have no final loss."])]
    for name in dict.fromkeys(key for one in ended for key in one["params"]):
        values = [(one["params"][name], one["loss"]) for one in ended if name in one["params"]]
        numbers = [(float(x), y) for x, y in values if isinstance(x, (int, float))]
        if len(numbers) > 1:
            spread = min(x for x, _ in numbers) > 0 and max(numbers)[0] > 4 * min(numbers)[0]
            slice_ = Chart(title=f"Loss against {name}", x_label=name, lines=[], dots=numbers, log_x=spread)
            panels.append(chart_panel(slice_))
    return panels


def tuning_report(study: TuningStudy) -> Report:
    """Of a search for settings."""
    heading, below = f"{study['method']}: settings by {len(study['trials'])} trials", subtitle(study)
    table, panels = trials_table(study), pictures(study)
    body = wide_table("Trials", "The best first; trial 0 has the configuration's own settings.", table)
    if study["importances"]:
        rows = [[name, format_percent(share)] for name, share in study["importances"].items()]
        what = "Share of the loss's variation near the best that a setting explains (PED-ANOVA), of complete trials."
        body += wide_table("What mattered", what, Table(heads=["setting", "share"], rows=rows))
    return Report(document(heading, below, body + "".join(map(section, panels))), heading, below, panels, table)
