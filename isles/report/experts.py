"""The page of `isles experts`: perplexities of every domain by every variant, way of joining and expert; the posterior
over a text; what it cost.

OUT/results.json -> tables (also for the terminal) -> OUT/report.html
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from isles.base.parsing import parse_json
from isles.report.page import Report, document, section, wide_table
from isles.report.panels import Chart, Panel, Polyline, Table, Titled, chart_panel, coloured
from isles.report.units import format_bytes, format_perplexity, format_seeds

# Key of the results, head of the column.
JOININGS = {
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
_DIFFICULTIES = ["easy", "medium", "difficult"]


def hdee_tables(results: dict[str, Any]) -> list[Titled]:
    """Variants by domain; ways of joining, variant by variant; random splits; where the posterior lies."""
    of = format_seeds(len(results["seeds"]))
    made = [_variants(results, of), *(_joinings(results, variant, of) for variant in results["groups"])]
    if "random" in results["mean"]:
        made.append(_random(results, of))
    return [*made, _posteriors(results)]


def _variants(results: dict[str, Any], of: str) -> Titled:
    mean, variants, last = results["mean"], list(results["groups"]), _last(results)
    kinds = {d["name"]: d["difficulty"].replace("_", " ") for d in results["domains"]}
    dense = {"dense": "dense, all steps"} if "dense" in mean else {}
    table = Table(
        heads=["domain", "difficulty", "seed model", *variants, f"{variants[0]} + seed", *dense.values()],
        rows=[
            [
                name,
                kinds[name],
                format_perplexity(mean["seed"][name]),
                *(format_perplexity(mean[v][last][name]["perplexity"]["posterior"]) for v in variants),
                format_perplexity(mean[variants[0]][last][name]["with_seed"]),
                *(format_perplexity(mean[key][name]) for key in dense),
            ]
            for name in kinds
        ],
        names=2,
    )
    what = f"experts joined by their posterior, uniform prior; {of}; '+ seed': the seed model is one more expert"
    if dense:
        what += "; dense: one medium model trained on all domains for the steps of all three experts"
    return "Perplexity by domain and variant", what, table


def _joinings(results: dict[str, Any], variant: str, of: str) -> Titled:
    group = results["groups"][variant]
    size = ", ".join(f"{f} x {t}" for f, t in zip(group["ffn"], group["steps"], strict=True))
    rows = []
    for name, record in results["mean"][variant][_last(results)].items():
        joined = [record["perplexity"][column] for column in JOININGS]
        rows.append([name, *map(format_perplexity, [*record["alone"], *joined, record.get("parameter_average")])])
    heads = ["domain", *_DIFFICULTIES, *JOININGS.values(), "one averaged model"]
    what = f"each expert alone, then ways of joining them; ffn x steps {size}; budget {group['ratio']:.3f}; {of}"
    return f"{variant}: experts and ways of joining", what, Table(heads=heads, rows=rows)


def _random(results: dict[str, Any], of: str) -> Titled:
    rows = []
    for name, record in results["mean"]["random"].items():
        joined = [record["perplexity"][column] for column in ("posterior", "arithmetic", "oracle")]
        rows.append([name, *map(format_perplexity, [*record["alone"], *joined])])
    heads = ["domain", "expert 0", "expert 1", "expert 2", "posterior", "arithmetic", "best expert"]
    what = f"medium experts that were trained on random thirds of all domains, as a check; {of}"
    return "Random splits: experts and ways of joining", what, Table(heads=heads, rows=rows)


def _posteriors(results: dict[str, Any]) -> Titled:
    """Where the posterior of each variant lies, and how soon it is sure."""
    rows = []
    for variant in results["groups"]:
        for name, record in results["mean"][variant][_last(results)].items():
            numbers = [*record["mean_posterior"], record["entropy"]]
            rows.append([variant, name, *map(format_perplexity, numbers), f"{record['sure_after']:.1f}"])
    heads = ["variant", "domain", *_DIFFICULTIES, "entropy, nats", "tokens until 99 %"]
    return (
        "The posterior: share of each expert, entropy, and when it is sure",
        "mean over tokens, uniform prior; where it is never sure, the whole sequence counts",
        Table(heads=heads, rows=rows, names=2),
    )


def hdee_pictures(results: dict[str, Any]) -> list[Panel]:
    """How the posterior moves over a text, one a domain."""
    return [_posterior(domain, record) for domain, record in results["posterior_over_text"].items()]


def _posterior(domain: str, record: dict[str, Any]) -> Panel:
    shares = zip(record["experts"], record["values"], strict=False)
    lines = coloured({name: [(float(index), share) for index, share in enumerate(own)] for name, own in shares})
    title = f"Posterior over a text of {domain}"
    chart = Chart(title=title, x_label="token", y_format=lambda y: f"{y:.2f}", lines=lines, whole_x=True)
    return chart_panel(chart, f"The text: {record['text']}")


def _last(results: dict[str, Any]) -> str:
    variant = next(iter(results["groups"]))
    return f"r{len(results['mean'][variant])}"


_DENSE = {"batch": "dense, E x batch", "steps": "dense, E x steps"}


def smalltalk_tables(results: dict[str, Any]) -> list[Titled]:
    """By domain, with the prefix's tokens and without; by seed; by what the gate reads; the experts and their loads."""
    trained = results["mean"]["trained"]["all"]
    dense = {form: name for form, name in _DENSE.items() if form in trained}
    columns = {**dense, "mixture": "mixture", "oracle": "best expert", "weighted": "all, weighted"}
    columns["random"] = "random expert"
    seeds = results["seeds"]
    of = format_seeds(len(seeds))
    made = [
        (
            "Perplexity by domain",
            f"mixture: one expert a sequence, chosen from its first {results['prefix']} tokens; dense: the FLOPs of "
            f"all experts' training, of one in use; 'all, weighted': of all in use; {of}",
            _by_text(results, "all", columns),
        ),
        (
            "Perplexity by domain, without the tokens of the prefix",
            f"the choice was made with knowledge of those; {of}",
            _by_text(results, "after_prefix", columns),
        ),
        _by_prefix(results, of),
    ]
    if len(seeds) > 1:
        rows = [
            [str(seed), *(format_perplexity(record["trained"]["all"][column]) for column in columns)]
            for seed, record in zip(seeds, results["by_seed"], strict=True)
        ]
        table = Table(heads=["seed", *columns.values()], rows=rows)
        made.append(("Perplexity by seed", "all trained domains", table))
    return [*made, _experts(results), _loads(results)]


def _by_text(results: dict[str, Any], part: str, columns: dict[str, str]) -> Table:
    mean = results["mean"]
    rows: list[tuple[str, dict[str, Any]]] = [("all trained domains", mean["trained"][part] or {})]
    for domain in results["domains"]:
        name, held_out = domain["name"], domain["difficulty"] == "held_out"
        rows.append((f"{name} (held out)" if held_out else name, mean["by_domain"][name][part] or {}))
    return Table(
        heads=["text", *columns.values()],
        rows=[[label, *(format_perplexity(record.get(column)) for column in columns)] for label, record in rows],
    )


def _by_prefix(results: dict[str, Any], of: str) -> Titled:
    trained = results["mean"]["trained"]
    lengths = {
        column: f"first {column.removeprefix('prefix-')}" for column in trained["all"] if column.startswith("prefix-")
    }
    grown = {
        column: f"so far, top {column.removeprefix('growing-')}"
        for column in trained["all"]
        if column.startswith("growing-")
    }
    heads = {**lengths, **grown, "growing": "so far, all"}
    rows = [["all tokens", *(format_perplexity(trained["all"][column]) for column in heads)]]
    if trained["after_prefix"]:
        rows.append(["without the prefix's", *(format_perplexity(trained["after_prefix"][column]) for column in heads)])
    what = (
        "all trained domains; first N tokens: one expert for the whole sequence; so far: experts mixed by weights that "
        f"are computed again after each {results['reweigh_every']} tokens, from all text before; {of}"
    )
    return "Perplexity by what the gate reads", what, Table(heads=["tokens evaluated", *heads.values()], rows=rows)


def _experts(results: dict[str, Any]) -> Titled:
    names = [domain["name"] for domain in results["domains"]]
    alone = results["by_seed"][0]["by_domain"]
    rows = [[name, *map(format_perplexity, alone[name]["alone"])] for name in names]
    heads = ["domain", *(f"expert {expert}" for expert in range(results["experts"]))]
    return "Perplexity by domain and expert", _first(results, "each expert alone"), Table(heads=heads, rows=rows)


def _loads(results: dict[str, Any]) -> Titled:
    routing = results["by_seed"][0]["routing"]
    training = [routing["purity_training"], None]
    test = [routing["purity_test"], routing["entropy_test"]]
    table = Table(
        heads=["sequences", *(f"expert {e}" for e in range(results["experts"])), "purity", "entropy, nats"],
        rows=[
            ["training", *map(str, routing["loads_training"]), *map(format_perplexity, training)],
            ["test", *map(str, routing["loads_test"]), *map(format_perplexity, test)],
        ],
    )
    what = (
        "sequences of each expert; purity: share that is of the commonest domain of its expert; entropy: of the gate's "
        "chances for a sequence, mean (0: always sure)"
    )
    return "Loads", _first(results, what), table


def _first(results: dict[str, Any], what: str) -> str:
    """Experts have no common number across seeds, so a table by expert is of one."""
    return f"{what}; seed {results['seeds'][0]}" if len(results["seeds"]) > 1 else what


def smalltalk_pictures(results: dict[str, Any]) -> list[Panel]:
    """The routers' rounds and the prefix."""
    made, mean = [], results["mean"]
    if mean["purity_by_round"]:
        points = [(float(number), value) for number, value in enumerate(mean["purity_by_round"], start=1)]
        made.append(_one_line("Purity of the shares", "round of the routers", points))
    lengths = {column: value for column, value in mean["trained"]["all"].items() if column.startswith("prefix-")}
    points = [(float(column.removeprefix("prefix-")), value) for column, value in lengths.items()]
    made.append(_one_line("Perplexity by the length of the prefix", "tokens that the gate reads", points))
    return made


def _one_line(heading: str, x_label: str, points: list[tuple[float, float]]) -> Panel:
    line = Polyline(points=points, css="mean", name=heading)
    chart = Chart(
        title=heading, x_label=x_label, y_format=lambda y: f"{y:.2f}", lines=[line], dots=points, whole_x=True
    )
    return Panel(heading=heading, picture=chart)


RESULTS = "results.json"
_SYSTEMS = {
    "hdee": (hdee_tables, hdee_pictures),
    "smalltalk": (smalltalk_tables, smalltalk_pictures),
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


def experts_report(results: dict[str, Any], name: str) -> Report:
    """Of what is in the folder `name`; its picture shows the first table."""
    title = "HDEE ensembles" if results["system"] == "hdee" else f"SMALLTALK LM, {results['experts']} experts"
    made, panels = tables(results), _SYSTEMS[results["system"]][1](results)
    body = "".join(wide_table(*titled) for titled in made) + _meanings(results)
    body += "".join(map(section, panels)) + _costs(results)
    page = document(title, f"perplexity per token on text that no model has seen · {name}", body)
    heading, what, table = made[0]
    return Report(page, f"{title}: {heading}", what, panels, table)


def _meanings(results: dict[str, Any]) -> str:
    """What the columns are, where they have names alone."""
    by_method = results.get("ways", {})
    rows = [(head, by_method[way]) for way, head in JOININGS.items() if way in by_method]
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
