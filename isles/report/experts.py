"""The page of `isles experts`: perplexities of every domain by every variant, way of joining and expert; the posterior
over a text; what it cost.

OUT/results.json -> tables (also for the terminal) -> OUT/report.html
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from isles.base.parsing import parse_json
from isles.report import experts_hdee, experts_smalltalk
from isles.report.page import document, section, wide_table
from isles.report.panels import Panel, Titled
from isles.report.units import format_bytes

RESULTS = "results.json"
_SYSTEMS = {
    "hdee": (experts_hdee.hdee_tables, experts_hdee.hdee_pictures),
    "smalltalk": (experts_smalltalk.smalltalk_tables, experts_smalltalk.smalltalk_pictures),
}


def read_results(out: Path) -> dict[str, Any]:
    """OUT/results.json. ValueError where it cannot be read."""
    try:
        return parse_json((out / RESULTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{out / RESULTS}: cannot be read ({error}); run isles experts eval {out}") from error


def tables(results: dict[str, Any]) -> list[Titled]:
    """(heading, what it holds, table) of each table."""
    return _SYSTEMS[results["system"]][0](results)


def pictures(results: dict[str, Any]) -> list[Panel]:
    """What is drawn of a system."""
    return _SYSTEMS[results["system"]][1](results)


def title(results: dict[str, Any]) -> str:
    """What was made."""
    return "HDEE ensembles" if results["system"] == "hdee" else f"SMALLTALK LM, {results['experts']} experts"


def render(results: dict[str, Any], name: str) -> str:
    """The page as text."""
    charts = "".join(map(section, pictures(results)))
    body = "".join(wide_table(*titled) for titled in tables(results)) + _meanings(results) + charts + _costs(results)
    return document(title(results), f"perplexity per token on text that no model has seen · {name}", body)


def _meanings(results: dict[str, Any]) -> str:
    """What the columns are, where they have names alone."""
    by_method = results.get("ways", {})
    rows = [(head, by_method[way]) for way, head in experts_hdee.JOININGS.items() if way in by_method]
    return _two_columns("Ways of joining experts", rows) if rows else ""


def _two_columns(heading: str, rows: list[tuple[str, str]]) -> str:
    cells = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows)
    return f"<section><h2>{escape(heading)}</h2><table>{cells}</table></section>"


def _costs(results: dict[str, Any]) -> str:
    rows = []
    for key, value in {**results.get("flops", {}), **results["bytes"]}.items():
        name = key.replace("_", " ")
        if key in results.get("flops", {}):
            rows.append((f"FLOPs, {name}", f"{value:.3g}"))
        elif key == "rounds":
            rows.append((name, str(value)))
        elif isinstance(value, dict):
            rows += [(f"bytes, {name}, {part}", format_bytes(number)) for part, number in value.items()]
        elif isinstance(value, list):
            rows.append((f"bytes, {name}, each", ", ".join(format_bytes(number) for number in value) or "-"))
        else:
            rows.append((f"bytes, {name}", format_bytes(value)))
    return _two_columns("Costs", rows)
