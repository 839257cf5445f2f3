"""The page of `isles tune`: the trials, how the best came about, loss against each setting, what mattered.

OUT/tune.json -> OUT/report.html

    {"method", "at", "seed", "config", "trials": [{"index", "state", "loss", "steps", "of", "settings", "params"}],
     "importances": {name: share}}

state: complete, pruned (stopped at a rung, or its numbers were not finite), running. steps: done, of so many.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isles.base.parsing import parse_json
from isles.report.page import document, section, wide_table
from isles.report.panels import Chart, Panel, Polyline, Table, chart_panel
from isles.report.units import format_percent

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


def tuning_title(study: TuningStudy) -> str:
    """The heading of the page."""
    return f"{study['method']}: settings by {len(study['trials'])} trials"


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


def render_tuning(study: TuningStudy) -> str:
    """The whole page as text."""
    body = wide_table("Trials", "The best first; trial 0 has the configuration's own settings.", trials_table(study))
    if study["importances"]:
        rows = [[name, format_percent(share)] for name, share in study["importances"].items()]
        what = "Share of the loss's variation near the best that a setting explains (PED-ANOVA), of complete trials."
        body += wide_table("What mattered", what, Table(heads=["setting", "share"], rows=rows))
    return document(tuning_title(study), subtitle(study), body + "".join(map(section, pictures(study))))
