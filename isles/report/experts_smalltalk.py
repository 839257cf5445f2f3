"""What `isles experts smalltalk` measured, as tables and pictures."""

from __future__ import annotations

from typing import Any

from isles.report.panels import Chart, Panel, Polyline, Table, Titled
from isles.report.units import format_perplexity, format_seeds

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
