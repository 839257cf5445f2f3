"""`comparison.md`: sentences and tables from the figures. No number of a result stands here: all come from the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from benchmarks._measure import machine
from benchmarks.comparison.cases import ROWS, STEP_SECONDS, TOPOLOGIES
from benchmarks.comparison.claims import Judged
from benchmarks.comparison.figures import REFERENCE, Figures, Spread, differences
from benchmarks.comparison.sweep_page import sweep_section
from benchmarks.comparison.text import gap, joined, loss, named, paragraph, points, span, table
from benchmarks.comparison.words import WHY
from isles.report.units import format_bytes, format_count, format_percent, format_seconds

BEHIND = 0.05  # nats a token after `ddp` from which a row counts as losing


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the page is about. methods: by label; sweep: by method and size. command: that made it. pictures: "bytes"
    and "gap", as seen from the page, where they are there.
    """

    methods: Mapping[str, Figures]
    sweep: Mapping[tuple[str, ...], Figures]
    judged: Sequence[Judged]
    seeds: Sequence[int]
    command: str
    pictures: Mapping[str, str]


def page(asked: Asked) -> str:
    """The whole text."""
    parts = [_head(asked)]
    if asked.methods:
        parts += [_methods(asked), _losers(asked), _claims(asked)]
    if asked.sweep:
        parts.append(sweep_section(asked.sweep, asked.seeds, asked.pictures.get("gap", "")))
    return joined(*parts) + "\n"


def _head(asked: Asked) -> str:
    rows = [*asked.methods.values(), *asked.sweep.values()]
    moments = [one["finished"] for row in rows for one in row.summaries.values()]
    days = sorted({datetime.fromtimestamp(moment, UTC).date().isoformat() for moment in moments})
    wall = sum(sum(row.values("wall_seconds").values()) for row in rows)
    when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "no runs yet"
    return joined(
        "# All methods on one job",
        "This page is written by a command; every number on it is computed from its runs:",
        f"    {asked.command}",
        paragraph(
            f"Runs of {when}: {len(moments)}, on {machine()}. One after another they took {format_seconds(wall)},",
            "with whatever else the machine had to do. Losses and bytes do not depend on the load. A run that is in",
            "the folder is not made again, so the command can be stopped and started again; after a change of a",
            "method's code, remove its folders there.",
        ),
    )


def _methods(asked: Asked) -> str:
    some = next(iter(asked.methods.values()))
    case, summary = next(iter(some.cases.values())), next(iter(some.summaries.values()))
    world, run, data = case.config.world, case.config.run, case.config.data
    context = case.config.model.shape().context
    places = [name for name in TOPOLOGIES if any(name in row.seconds for row in asked.methods.values())]
    heads = ["method", "validation loss", "mean of the workers' own", "behind `ddp`", "sent by a worker", "of `ddp`'s"]
    heads += [*(f"time, {TOPOLOGIES[name]}" for name in places), "computing", "memory"]
    ordered = sorted(asked.methods.values(), key=lambda row: Spread.of(row.loss.values()).mean)
    notes = [f"`{label}`: {ROWS[label].note}." for label in asked.methods if ROWS[label].note]
    picture = asked.pictures.get("bytes", "")
    return joined(
        "## At the same tokens",
        paragraph(
            f"{world.workers} workers, {format_count(summary['parameters'])} parameters over bytes, {run.steps}",
            f"steps of {data.batch_size} sequences of {context} bytes a worker, {format_count(summary['tokens'])}",
            "tokens in all, the source of Python's standard library. Settings are the embedded run's (`isles config",
            "--method NAME`), which has one small table for each method, made for a run of 800 steps; the rates of",
            "`delayed`, `streaming-diloco` and `sparseloco` were chosen on seed 0 of this one. Seeds",
            f"{', '.join(map(str, asked.seeds))}: mean ± standard deviation, nats a token. Within a seed all methods",
            "start from the same weights and read the same data in the same order.",
        ),
        paragraph(
            f"The virtual clock charges {STEP_SECONDS:g} s for a step, and for a message what the links ask",
            f"({', '.join(f'`{preset}`: {words}' for preset, words in TOPOLOGIES.items())}). Results do not depend",
            "on the links, so each seed ran on another topology, and a time is that of one run. The model of",
            f"{format_bytes(4 * summary['parameters'])} makes light messages: for yours, see",
            "[planning.md](planning.md).",
        ),
        table(heads, [_method_row(row, asked, places) for row in ordered]),
        paragraph(
            "*validation loss*: of the one model of the run. `none` has none (the mean of weights that never met),",
            "so here and below its workers' own losses stand for it. *behind*: seed by seed. *computing*: share of",
            "the time that is not spent waiting, worst and best topology. *memory*: bytes a parameter of a worker",
            "at its fullest (weights, gradients, inner optimizer, method; no activations), from the dry run of the",
            f"{REFERENCE.size} model. `custom` is left out: it is a box of parts.",
        ),
        points(notes),
        f"![loss against bytes]({picture})" if picture else "",
    )


def _method_row(row: Figures, asked: Asked, places: Sequence[str]) -> list[str]:
    there, wanted = len(row.summaries), len(asked.seeds)
    sent, reference = row.spread("bytes_sent_per_worker"), row.spread("ddp_bytes_per_worker")
    computing = row.values("compute_utilisation").values() if ROWS[row.label].timed else ()
    assert sent is not None and reference is not None
    times, across = row.seconds, row.spread("bytes_across_per_worker")
    return [
        f"`{row.label}`" + ("" if there == wanted else f" ({there} of {wanted} seeds)"),
        loss(row.spread("val_loss")),
        loss(row.spread("val_loss_replicas")),
        gap(row, asked.methods.get("ddp")),
        format_bytes(sent.mean) + ("" if across is None else f", {format_bytes(across.mean)} across"),
        format_percent(sent.mean / reference.mean),
        *(format_seconds(times[name]) if name in times else "-" for name in places),
        span([100 * share for share in computing], "{:.0f}", " %") if computing else "-",
        f"{row.memory:.1f}",
    ]


def _losers(asked: Asked) -> str:
    reference = asked.methods.get("ddp")
    if reference is None:
        return ""
    found = {row.label: differences(row, reference) for row in asked.methods.values() if row is not reference}
    behind = {label: Spread.of(values.values()).mean for label, values in found.items() if values}
    losing = sorted((label for label in behind if behind[label] > BEHIND), key=lambda label: -behind[label])
    near = [label for label in behind if label not in losing]
    alone = behind.get("none")
    worse = [] if alone is None else [label for label in losing if behind[label] > alone]
    return joined(
        "## What loses, and why",
        paragraph(
            "At equal tokens nothing is expected to beat `ddp`: it sees every worker's gradient at every step.",
            f"Within {BEHIND:g} of it: {named(near)}. Further behind, the furthest first; the runs show the",
            "distance, the reasons are ours, from how the methods work:",
        ),
        points([f"`{label}`, {behind[label]:.2f}: {WHY[label]}." for label in losing]),
        paragraph(f"Worse than not talking at all, on this job: {named(worse)}.") if worse else "",
    )


def _claims(asked: Asked) -> str:
    if not asked.judged:
        return ""
    rows = [
        [
            one.claim.words,
            one.claim.source,
            f"{one.mean:+.3f}" if one.found else "-",
            span(one.found, "{:+.3f}") if one.found else "-",
            one.verdict,
        ]
        for one in asked.judged
    ]
    kept = sum(one.verdict == "holds" for one in asked.judged)
    return joined(
        "## Who beats whom",
        paragraph(
            "Claims with a margin in nats a token, chosen beforehand from the papers and from smaller runs, and put",
            "to these. The difference is the second's loss less the first's: above 0, the first is better. A claim",
            f"*holds* if it does in every seed that both rows have; {kept} of {len(asked.judged)} do. Most papers",
            "speak of models a thousand times larger and of runs a hundred times longer: what does not hold here is",
            "not refuted.",
        ),
        table(["claim", "who says so", "mean difference", "over the seeds", "verdict"], rows, names=2),
    )
