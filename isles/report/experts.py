"""The page of `isles experts`: perplexities of every domain by every variant, way of joining and expert; the posterior
over a text; what it cost.

OUT/results.json -> tables (also for the terminal) -> OUT/report.html
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from isles.report.page import document, section, wide_table
from isles.report.panels import Chart, Line, Panel, Table
from isles.report.style import SERIES
from isles.report.units import format_bytes

RESULTS = "results.json"

# Key of the results, head of the column.
_WAYS = {
    "posterior": "posterior",
    "cached": "cached prior",
    "updating": "updating prior",
    "top_1": "top 1",
    "ridge": "ridge gate",
    "last_token": "last token",
    "arithmetic": "arithmetic",
    "geometric": "geometric",
    "oracle": "best expert",
}
_DENSE = {"batch": "dense, E x batch", "steps": "dense, E x steps"}

Titled = tuple[str, str, Table]


def read_results(out: Path) -> dict[str, Any]:
    """OUT/results.json. ValueError where it cannot be read."""
    try:
        return json.loads((out / RESULTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{out / RESULTS}: cannot be read ({error}); run isles experts eval {out}") from error


def tables(results: dict[str, Any]) -> list[Titled]:
    """(heading, what it holds, table) of each table."""
    return _hdee(results) if results["system"] == "hdee" else _smalltalk(results)


def title(results: dict[str, Any]) -> str:
    """What was made."""
    return "HDEE ensembles" if results["system"] == "hdee" else f"SMALLTALK LM, {results['experts']} experts"


def render(results: dict[str, Any], name: str) -> str:
    """The page as text."""
    charts = "".join(map(section, pictures(results)))
    body = "".join(wide_table(*titled) for titled in tables(results)) + _meanings(results) + charts + _costs(results)
    return document(title(results), f"perplexity per token on text that no model has seen · {name}", body)


def _hdee(results: dict[str, Any]) -> list[Titled]:
    mean, kinds = results["mean"], {d["name"]: d["difficulty"].replace("_", " ") for d in results["domains"]}
    variants, last = list(results["cells"]), _last(results)
    seeds = len(results["seeds"])
    of = f"mean of {seeds} seeds" if seeds > 1 else "one seed"
    first = Table(
        heads=["domain", "difficulty", "seed model", *variants, f"{variants[0]} + seed"],
        rows=[
            [
                name,
                kinds[name],
                _number(mean["seed"][name]),
                *(_number(mean[v][last][name]["perplexity"]["posterior"]) for v in variants),
                _number(mean[variants[0]][last][name]["with_seed"]),
            ]
            for name in kinds
        ],
        names=2,
    )
    made: list[Titled] = [
        (
            "Perplexity by domain and variant",
            f"experts joined by their posterior, uniform prior; {of}; '+ seed': the seed model is one more expert",
            first,
        )
    ]
    for variant in variants:
        cell = results["cells"][variant]
        size = ", ".join(f"{f} x {t}" for f, t in zip(cell["ffn"], cell["steps"], strict=True))
        rows = []
        for name in kinds:
            told = mean[variant][last][name]
            rows.append(
                [
                    name,
                    *map(_number, told["alone"]),
                    *(_number(told["perplexity"][way]) for way in _WAYS),
                    _number(told.get("parameter_average")),
                ]
            )
        heads = ["domain", "easy", "medium", "difficult", *_WAYS.values(), "one averaged model"]
        what = f"each expert alone, then ways of joining them; ffn x steps {size}; budget {cell['ratio']:.3f}; {of}"
        made.append((f"{variant}: experts and ways of joining", what, Table(heads=heads, rows=rows)))
    return [*made, _posteriors(results)]


def _posteriors(results: dict[str, Any]) -> Titled:
    """Where the posterior of each variant lies, and how soon it is sure."""
    rows = []
    for variant in results["cells"]:
        for name, told in results["mean"][variant][_last(results)].items():
            numbers = [*told["mean_posterior"], told["entropy"]]
            rows.append([variant, name, *map(_number, numbers), f"{told['sure_after']:.1f}"])
    heads = ["variant", "domain", "easy", "medium", "difficult", "entropy, nats", "tokens until 99 %"]
    return (
        "The posterior: share of each expert, entropy, and when it is sure",
        "mean over tokens, uniform prior; where it is never sure, the whole sequence counts",
        Table(heads=heads, rows=rows, names=2),
    )


def _smalltalk(results: dict[str, Any]) -> list[Titled]:
    kinds = {d["name"]: d["difficulty"] != "held_out" for d in results["domains"]}
    dense = [form for form in _DENSE if form in results["trained"]["all"]]
    ways = {**{form: _DENSE[form] for form in dense}, "mixture": "mixture", "oracle": "best expert"}
    ways["weighted"] = "all, weighted"
    ways["random"] = "random expert"

    def by_text(part: str, columns: dict[str, str]) -> Table:
        rows: list[tuple[str, dict[str, Any]]] = [("all trained domains", results["trained"][part] or {})]
        for name, trained in kinds.items():
            rows.append((name if trained else f"{name} (held out)", results["by_domain"][name][part] or {}))
        return Table(
            heads=["text", *columns.values()],
            rows=[[label, *(_number(told.get(way)) for way in columns)] for label, told in rows],
        )

    lengths = [way for way in results["trained"]["all"] if way.startswith("prefix-")]
    second = Table(
        heads=["prefix, tokens", *(way.removeprefix("prefix-") for way in lengths)],
        rows=[["perplexity, all trained domains", *(_number(results["trained"]["all"][way]) for way in lengths)]],
    )
    experts = range(results["experts"])
    third = Table(
        heads=["domain", *(f"expert {e}" for e in experts)],
        rows=[[name, *map(_number, results["by_domain"][name]["alone"])] for name in kinds],
    )
    routing = results["routing"]
    fourth = Table(
        heads=["sequences", *(f"expert {e}" for e in experts), "purity", "entropy, nats"],
        rows=[
            ["training", *map(str, routing["loads_training"]), _number(routing["purity_training"]), _number(None)],
            [
                "test",
                *map(str, routing["loads_test"]),
                *map(_number, (routing["purity_test"], routing.get("entropy_test"))),
            ],
        ],
    )
    return [
        (
            "Perplexity by domain",
            f"mixture: one expert a sequence, chosen from its first {results['prefix']} tokens; dense: the FLOPs of "
            "all experts' training, of one in use; 'all, weighted': of all in use",
            by_text("all", ways),
        ),
        (
            "Perplexity by domain, without the tokens of the prefix",
            "the choice was made with knowledge of those",
            by_text("after_prefix", ways),
        ),
        ("Perplexity by the length of the prefix that is read", "routers are those trained on the longest", second),
        ("Perplexity by domain and expert", "each expert alone", third),
        (
            "Loads",
            "sequences of each expert; purity: share that is of the commonest domain of its expert; entropy: of the "
            "gate's chances for a sequence, mean (0: always sure)",
            fourth,
        ),
    ]


def _meanings(results: dict[str, Any]) -> str:
    """What the columns are, where they have names alone."""
    said = results.get("ways", {})
    rows = [(head, said[way]) for way, head in _WAYS.items() if way in said]
    return _two_columns("Ways of joining experts", rows) if rows else ""


def _two_columns(heading: str, rows: list[tuple[str, str]]) -> str:
    cells = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows)
    return f"<section><h2>{escape(heading)}</h2><table>{cells}</table></section>"


def pictures(results: dict[str, Any]) -> list[Panel]:
    """How the posterior moves over a text, one a domain; of SMALLTALK, the routers' rounds and the prefix."""
    if results["system"] == "hdee":
        return [_posterior(domain, told) for domain, told in results["posterior_over_text"].items()]
    made = []
    if results["purity_by_round"]:
        points = [(float(number), value) for number, value in enumerate(results["purity_by_round"], start=1)]
        made.append(_one_line("Purity of the shares", "round of the routers", points))
    lengths = {way: value for way, value in results["trained"]["all"].items() if way.startswith("prefix-")}
    points = [(float(way.removeprefix("prefix-")), value) for way, value in lengths.items()]
    made.append(_one_line("Perplexity by the length of the prefix", "tokens that the gate reads", points))
    return made


def _one_line(heading: str, x_label: str, points: list[tuple[float, float]]) -> Panel:
    line = Line(points=points, css="mean", name=heading)
    chart = Chart(
        title=heading, x_label=x_label, y_format=lambda y: f"{y:.2f}", lines=[line], dots=points, whole_x=True
    )
    return Panel(heading=heading, picture=chart)


def _posterior(domain: str, told: dict[str, Any]) -> Panel:
    lines = [
        Line(points=[(float(place), value) for place, value in enumerate(values)], css=css, name=name)
        for css, name, values in zip(SERIES, told["experts"], told["values"], strict=False)
    ]
    heading = f"Posterior over a text of {domain}"
    chart = Chart(title=heading, x_label="token", y_format=lambda y: f"{y:.2f}", lines=lines, whole_x=True)
    keys = [(line.css, line.name) for line in lines]
    return Panel(heading=heading, picture=chart, keys=keys, notes=[f"The text: {told['text']}"])


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


def _last(results: dict[str, Any]) -> str:
    variant = next(iter(results["cells"]))
    return f"r{len(results['mean'][variant])}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
