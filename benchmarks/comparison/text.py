"""Markdown: paragraphs, tables, numbers with their spread."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from benchmarks.comparison.figures import Figures, Spread, behind
from isles.report.comparison import Paired

_WIDTH = 120


def paragraph(*sentences: str) -> str:
    """Sentences, broken into lines."""
    return textwrap.fill(" ".join(sentences), _WIDTH, break_long_words=False, break_on_hyphens=False)


def points(lines: Sequence[str]) -> str:
    """A list of points."""
    return "\n".join(textwrap.fill(f"- {line}", _WIDTH, subsequent_indent="  ") for line in lines)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> str:
    """A table whose first `names` columns are words."""
    lines = [heads, ["---"] * names + ["---:"] * (len(heads) - names), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def joined(*parts: str) -> str:
    """Parts with an empty line between; empty ones are left out."""
    return "\n\n".join(filter(None, parts))


def loss(spread: Spread | None) -> str:
    """Mean ± half of its 95 % interval; "-" where there is nothing."""
    if spread is None:
        return "-"
    return f"{spread.mean:.4f}" if spread.half is None else f"{spread.mean:.4f} ± {spread.half:.4f}"


def gap(row: Figures | None, reference: Figures | None) -> str:
    """How far a row is behind another, seed by seed: mean and 95 % interval."""
    if row is None or reference is None:
        return "-"
    return "0" if row is reference else interval(behind(row, reference))


def interval(found: Paired | None) -> str:
    """Mean ± half of the interval."""
    return "-" if found is None else f"{found.mean:+.4f} ± {found.half:.4f}"


def span(values: Iterable[float], form: str, unit: str = "") -> str:
    """The least and the largest, each as `form` (of str.format) says; one number where they look alike."""
    values = list(values)
    ends = dict.fromkeys(form.format(value) for value in (min(values), max(values)))
    return " to ".join(ends) + unit


def named(labels: Sequence[str]) -> str:
    """Rows in a sentence."""
    return ", ".join(f"`{label}`" for label in labels) or "nobody"
