"""The page: heading, the figures that matter, the pictures, every number of the summary, the configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from isles.base.schema import USAGE
from isles.membership.run_log import JOURNAL
from isles.report.charts import (
    bytes_panel,
    course_panels,
    lanes_panel,
    loss_cost_panels,
    loss_panel,
    spread_panel,
    step_panel,
    time_panel,
)
from isles.report.draw.style import STYLE
from isles.report.draw.svg import draw
from isles.report.panels import Panel, Table
from isles.report.rundir import RunFiles, finite
from isles.report.units import (
    compare,
    format_bytes,
    format_count,
    format_number,
    format_percent,
    format_seconds,
    format_short,
)

_REASONS = 8  # that are named


def _sent_over(channels: Any) -> dict[str, float | None]:
    """Bytes by channel, whatever a file holds."""
    entries = channels.items() if isinstance(channels, Mapping) else ()
    return {name: finite(counts.get("bytes_sent")) for name, counts in entries if isinstance(counts, Mapping)}


def _by_channel(channels: Any) -> str:
    if not isinstance(channels, Mapping):
        return _raw(channels)
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in _sent_over(channels).items() if nbytes)


def format_counts(counts: Any) -> str:
    """Of a table of numbers, whatever a file holds."""
    return _listed(counts, format_count)


def format_link_bytes(links: Any) -> str:
    """Of a table of bytes, without the list of pairs."""
    if isinstance(links, Mapping):
        links = {name: value for name, value in links.items() if name != "pairs"}
    return _listed(links, format_bytes)


def format_rejections(rows: Any) -> str:
    """Who was refused how often, and why, the most frequent first."""
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        return json.dumps(rows)
    ordered = sorted(rows, key=lambda row: -(finite(row.get("times")) or 0))
    parts = [f"member {row.get('member')}, {row.get('times')} times: {row.get('reason')}" for row in ordered[:_REASONS]]
    more = [f"and {len(ordered) - _REASONS} more"] if len(ordered) > _REASONS else []
    return "; ".join(parts + more) or "nothing"


def _listed(table: Any, form: Callable[[Any], str]) -> str:
    if not isinstance(table, Mapping) or any(finite(value) is None for value in table.values()):
        return json.dumps(table)
    return ", ".join(f"{_words(name)} {form(value)}" for name, value in table.items()) or "nothing"


def _words(name: Any) -> str:
    """A key, or the name of an error, in words."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", str(name)).replace("_", " ").lower()


_NAMES = (str, _by_channel, format_counts, format_link_bytes, format_rejections)
"""Forms for what is no number."""
# Key of summary.json, its name in words, its form.
FIELDS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("method", "Method", str),
    ("backend", "Backend", str),
    ("workers", "Workers", format_count),
    ("stages", "Stages of a replica", format_count),
    ("replicas", "Replicas", format_count),
    ("islands", "Islands, each a replica", format_count),
    ("steps", "Inner steps", format_count),
    ("tokens", "Tokens", format_count),
    ("parameters", "Parameters", format_count),
    ("val_loss", "Validation loss, consolidated model", format_number),
    ("val_loss_replicas", "Validation loss, mean over the replicas", format_number),
    ("replica_std", "Standard deviation between the replicas", format_number),
    ("bytes_sent_per_worker", "Sent per worker", format_bytes),
    ("bytes_across_per_worker", "Sent per worker across islands", format_bytes),
    ("priced_as", "Priced as", str),
    ("priced_bytes_per_worker", "Sent per worker as priced", format_bytes),
    ("bytes_received_per_worker", "Received per worker", format_bytes),
    ("channels", "Of that, by channel", _by_channel),
    ("ddp_bytes_per_worker", "Data parallel would have sent per worker", format_bytes),
    ("compute_seconds", "Computing", format_seconds),
    ("blocked_seconds", "Blocked on the network", format_seconds),
    ("compute_utilisation", "Share of the time spent computing", format_percent),
    ("pipeline_bubble", "Share of the time spent waiting for other stages", format_percent),
    ("tokens_per_second", "Tokens a second of a worker, at the end", format_short),
    ("mfu", "Model FLOP utilisation of the GPUs, at the end", format_percent),
    ("memory_bytes", "GPU memory of a worker, at the end", format_bytes),
    ("memory_peak_bytes", "Of that, at its peak", format_bytes),
    ("memory_reserved_bytes", "GPU memory that torch holds for it", format_bytes),
    ("memory", "Plan of memory", lambda memory: f"{memory['plan']}, {format_bytes(memory['planned_peak_bytes'])}"),
    ("goodput", "Goodput: share of the members' time in steps that count", format_percent),
    ("work_lost", "Computing whose work is in no worker's weights", format_percent),
    ("rounds", "Rounds of all workers", format_count),
    ("rounds_alone", "Of that, without any other worker's work", format_percent),
    ("outcomes", "By how their exchange ended", format_counts),
    ("rounds_again", "Exchanges tried again", format_count),
    ("rounds_unassigned", "Rounds that read unassigned samples", format_count),
    ("inner_steps", "Inner steps of all workers", format_count),
    ("inner_steps_counted", "Of that, whose work is in the model", format_count),
    ("inner_steps_backlog", "Inner steps of the backlog", format_count),
    ("inner_steps_repeated", "Inner steps of the data that were read twice", format_count),
    ("joins", "Workers that joined", format_count),
    ("losses", "Connections that broke", format_count),
    ("steps_lost", "Inner steps lost as the run began again", format_count),
    ("begun", "Times that a swarm began", format_count),
    ("deaths", "Workers that were lost", format_count),
    ("leaves", "Workers that announced that they leave", format_count),
    ("views", "Views", format_count),
    ("outages", "Times that the lighthouse was away", format_count),
    ("state_transfers", "States transferred to joiners", format_count),
    ("state_transfer_bytes", "Their bytes", format_bytes),
    ("links", "Between workers, by link", format_link_bytes),
    ("refused", "Refused", format_rejections),
    ("train_seconds", "Training", format_seconds),
    ("wall_seconds", "Wall time, start and end included", format_seconds),
    ("virtual_seconds", "Virtual time", format_seconds),
    ("seed", "Seed", str),
    ("corpus_sha256", "Corpus (SHA-256)", str),
    ("isles_version", "Isles version", str),
)


class Report(NamedTuple):
    """page: all of it, as text. The others are what the picture beside it shows: a heading, the line below it, panels,
    and a table in front of them.
    """

    page: str
    heading: str
    below: str
    panels: Sequence[Panel]
    table: Table | None = None


def run_report(run: RunFiles) -> Report:
    """Of one run."""
    heading, below, shown = title(run), subtitle(run), panels(run)
    charts = "\n".join(map(section, shown))
    page = document(heading, below, f"{_notes(run)}{_headline(run)}\n{charts}\n{_table(run)}\n{_config(run)}")
    return Report(page, heading, below, [panel for panel in shown if panel.picture is not None])


def panels(run: RunFiles) -> list[Panel]:
    """The pictures of a run, those for which it has the data."""
    elastic, losses = [], loss_panel(run)
    if (run.path / JOURNAL).is_file():  # its reading loads the lighthouse's messages, a third of a page's time
        from isles.report.elastic import elastic_panels, marked

        elastic, losses = elastic_panels(run), losses and marked(run, losses)
    made = [
        losses,
        *([] if elastic else loss_cost_panels(run)),  # means over workers of whom some came later go back in time
        bytes_panel(run),
        spread_panel(run),
        time_panel(run),
        lanes_panel(run),
        step_panel(run),
        *course_panels(run),
        *elastic,
    ]
    return [panel for panel in made if panel is not None]


def section(panel: Panel) -> str:
    """A `<section>` with heading, legend, picture and caption."""
    legend = "".join(f'<span class="key"><i class="swatch {css}"></i>{escape(text)}</span>' for css, text in panel.keys)
    legend = f'<p class="legend">{legend}</p>' if legend else ""
    picture = draw(panel.picture) if panel.picture is not None else ""
    caption = f"<figcaption>{escape(' '.join(panel.notes))}</figcaption>" if panel.notes else ""
    return f"<section><h2>{escape(panel.heading)}</h2>{legend}<figure>{picture}</figure>{caption}</section>"


def wide_table(heading: str, what: str, table: Table) -> str:
    """A `<section>` with a table of many columns, below a line that says what it holds."""
    return (
        f'<section><h2>{escape(heading)}</h2><p class="sub">{escape(what)}</p>'
        f'<div class="scroll"><table class="wide">{_cells("th", table.heads, table.names)}'
        f"{''.join(_cells('td', row, table.names) for row in table.rows)}</table></div></section>"
    )


def _cells(tag: str, row: Sequence[str], names: int) -> str:
    left = ' class="name"'
    cells = (f"<{tag}{left if place < names else ''}>{escape(cell)}</{tag}>" for place, cell in enumerate(row))
    return f"<tr>{''.join(cells)}</tr>"


def document(title: str, subtitle: str, body: str) -> str:
    """An HTML page: no scripts, no links, nothing fetched."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>\n"
        f'<header><h1>{escape(title)}</h1><p class="sub">{escape(subtitle)}</p></header>\n'
        f"{body}\n</main></body></html>\n"
    )


def _summary(run: RunFiles) -> dict[str, Any]:
    """The summary, or what can be said of a run that has none yet from its configuration and its last lines."""
    if run.summary is not None:
        return run.summary
    compute, blocked = run.mean_total("compute_seconds"), run.mean_total("blocked_seconds")
    known = {
        "method": run.setting("replicas", "method"),
        "backend": run.setting("world", "backend"),
        "workers": len(run.workers) or run.setting("world", "workers"),
        "steps": run.last_step if run.workers else None,
        "bytes_sent_per_worker": run.mean_total("bytes_sent"),
        "bytes_received_per_worker": run.mean_total("bytes_received"),
        "seed": run.setting("run", "seed"),
    }
    if compute is not None and blocked is not None and compute + blocked > 0:
        known["compute_utilisation"] = compute / (compute + blocked)
    return {key: value for key, value in known.items() if value is not None}


def title(run: RunFiles) -> str:
    """Method, workers, steps."""
    summary = _summary(run)
    parts = str(summary.get("method", run.path.resolve().name))
    if "workers" in summary:
        parts += f" on {_counted(summary['workers'], 'worker')}"
    if "stages" in summary and "replicas" in summary:
        parts += f", {_counted(summary['replicas'], 'replica')} of {_counted(summary['stages'], 'stage')}"
    elif "islands" in summary:
        parts += f" in {_counted(summary['islands'], 'island')}"
    if "steps" in summary:
        parts += f", {_counted(summary['steps'], 'step')}"
    return parts + run.price if run.summary is not None else f"{parts} so far"


def subtitle(run: RunFiles) -> str:
    """Parameters, tokens, backend, name of the directory."""
    summary = _summary(run)
    parts = []
    for key in ("parameters", "tokens"):
        if (count := finite(summary.get(key))) is not None:
            parts.append(f"{format_short(count)} {key}")
    if "backend" in summary:
        parts.append(str(summary["backend"]))
    parts.append(f"run {run.path.resolve().name}")
    return " · ".join(parts)


def _notes(run: RunFiles) -> str:
    notes = list(run.notes)
    if run.summary is None and not any("summary.json" in note for note in notes):
        notes.insert(
            0, "This run has not ended, or was cut short: there is no summary.json. Shown is what it wrote so far."
        )
    missing = ["of the spread of the replicas"] * (len(run.workers) > 1 and not run.spread)
    missing += ["of when workers computed and exchanged (timeline.jsonl)"] * (bool(run.workers) and not run.spans)
    comes_and_goes = run.number("goodput") is not None  # such a run has lanes of rounds in their place
    if missing and run.summary is not None and not comes_and_goes:  # one that goes on may still write it
        notes.append(f"This run has no record {' nor '.join(missing)}; newer versions of Isles write one.")
    sent, counted = run.number("bytes_sent_per_worker"), run.mean_total("bytes_sent")
    # The last exchanges may come after the last line, so the summary may hold more, but not less, and not a multiple.
    if sent is not None and counted is not None and not sent / 2 <= counted <= sent * 1.01:
        notes.append(
            f"metrics.jsonl and summary.json disagree on the bytes sent per worker: {format_bytes(counted)} "
            f"against {format_bytes(sent)}."
        )
    return "".join(f'<p class="note">{escape(note)}</p>' for note in notes)


def _headline(run: RunFiles) -> str:
    """The three or four figures that a reader wants first."""
    summary = _summary(run)
    cards: list[tuple[str, str]] = []
    if (loss := finite(summary.get("val_loss"))) is not None:
        cards.append((format_number(loss), "validation loss"))
    if (sent := finite(summary.get("bytes_sent_per_worker"))) is not None:
        cards.append((format_bytes(sent), "sent per worker"))
        reference = finite(summary.get("ddp_bytes_per_worker"))
        if sent > 0 and reference is not None and reference > 0:
            amount, _, word = compare(sent, reference).rpartition(" ")
            cards.append((amount, f"{word} data parallel would have sent"))
    if (across := finite(summary.get("bytes_across_per_worker"))) is not None:
        cards.append((format_bytes(across), "of that across islands"))
    elif (between := _sent_over(summary.get("channels")).get("outer")) is not None and "stages" in summary:
        cards.append((format_bytes(between), "of that to other replicas"))
    if (share := finite(summary.get("compute_utilisation"))) is not None:
        cards.append((format_percent(share), "of the time computing"))
    boxes = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in cards)
    return f'<div class="cards">{boxes}</div>' if boxes else ""


def _table(run: RunFiles) -> str:
    """Every key of the summary, and the means of what workers' GPUs did, in human units and, where those round it away,
    the exact number beside them.
    """
    usage = {key: mean for key in USAGE if (mean := run.mean_total(key)) is not None}
    summary = _summary(run) | usage
    texts = [key for key in summary if key.startswith("val_loss.")]
    fields = [*FIELDS, *((key, f"Validation loss on {key[9:]}", format_number) for key in texts)]
    known = {key for key, _, _ in fields}
    rows = [_row(key, name, summary[key], form) for key, name, form in fields if summary.get(key) is not None]
    rows += [
        _row(key, _words(key).capitalize(), value, _raw)
        for key, value in summary.items()
        if key not in known and value is not None
    ]
    if not rows:
        return ""
    heading = "Summary" if run.summary is not None else "So far"
    return f"<section><h2>{heading}</h2><table>{''.join(rows)}</table></section>"


def _row(key: str, name: str, value: Any, form: Callable[[Any], str]) -> str:
    if form not in (_raw, *_NAMES) and finite(value) is None:
        form = _raw
    shown, exact = form(value), ""
    if form is format_bytes and value >= 1000:
        exact = f"{value:,.0f} bytes"
    elif form is format_seconds and value >= 100:
        exact = f"{value:,.1f} s"
    return (
        f'<tr data-key="{escape(key)}"><th scope="row">{escape(name)}</th>'
        f"<td>{escape(shown)}{f'<small>{escape(exact)}</small>' if exact else ''}</td></tr>"
    )


def _config(run: RunFiles) -> str:
    if not run.config_text:
        return ""
    text = escape(run.config_text)
    return f"<section><details><summary>Configuration (config.toml)</summary><pre>{text}</pre></details></section>"


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _counted(count: Any, noun: str) -> str:
    return f"{format_count(count) if finite(count) is not None else count} {noun}{'' if count == 1 else 's'}"
