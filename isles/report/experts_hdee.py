"""What `isles experts hdee` measured, as tables and pictures."""

from __future__ import annotations

from typing import Any

from isles.report.panels import Chart, Panel, Table, Titled, chart_panel, coloured
from isles.report.units import format_perplexity, format_seeds

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
