"""`comparison.md`: sentences and tables from the figures. No number of a result stands here: all come from the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.comparison.cases import AS, AS_TOKENS, ROWS, TOPOLOGIES, Key
from benchmarks.comparison.claims import Judged
from benchmarks.comparison.figures import REFERENCE, Figures, Spread, behind, front
from benchmarks.comparison.sweep_page import ladder_section
from benchmarks.comparison.text import gap, interval, joined, loss, named, paragraph, points, table
from benchmarks.comparison.words import WHY
from isles.report.comparison import ALONE, NEVER
from isles.report.units import format_bytes, format_count, format_percent, format_seconds

BEHIND = 0.05  # nats a token after `ddp` from which a row counts as losing
ALIKE = 0.02  # nats a token that a look amid a run does not tell apart
Methods = Mapping[str, Figures]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the page is about. parts: the regimes, each by row; ladder: by row and size. command: that made it.
    pictures: by name, as seen from the page.
    """

    parts: Mapping[str, Methods]
    ladder: Mapping[Key, Figures]
    judged: Sequence[tuple[str, Judged]]
    command: str
    pictures: Mapping[str, str]


def page(asked: Asked) -> str:
    """The whole text."""
    made = [_head(asked)]
    for part, methods in asked.parts.items():
        if methods:
            judged = [one for of, one in asked.judged if of == part]
            made += [_methods(part, methods, asked), _clocks(part, methods), _losers(methods), _claims(judged)]
    if asked.ladder:
        made.append(ladder_section(asked.ladder, asked.pictures.get("gap", "")))
    return joined(*made) + "\n"


def _head(asked: Asked) -> str:
    rows = [*(row for methods in asked.parts.values() for row in methods.values()), *asked.ladder.values()]
    wall = sum(sum(row.values("wall_seconds").values()) for row in rows)
    commits = sorted({one["settings"][:10] for row in rows for one in row.rows.values()})
    return joined(
        "# All methods on one job",
        "This page is written by a command; every number on it is computed from its runs:",
        f"    {asked.command}",
        paragraph(
            f"{sum(len(row.rows) for row in rows)} runs, {format_seconds(wall)} one after another, with whatever else",
            "the machine had to do. Losses and bytes do not depend on the load. Each row has settings of its own,",
            "found by one budget a row on another seed and on text that no run here is judged by; they were committed",
            f"({', '.join(commits)}) before the first run was made, and every run was made once.",
        ),
    )


def _methods(part: str, methods: Methods, asked: Asked) -> str:
    some = next(iter(methods.values()))
    case, summary = next(iter(some.cases.values())), next(iter(some.rows.values()))["summary"]
    world, data = case.base.world, case.base.data
    seeds = sorted({seed for row in methods.values() for seed in row.rows})
    heads = [
        "row",
        "validation loss",
        "mean of the workers' own",
        "behind `ddp`",
        "ahead of `none`",
        "sent by a worker",
    ]
    heads += ["of `ddp`'s", "memory"]
    ordered = sorted(methods.values(), key=lambda row: Spread.of(row.loss.values()).mean)
    notes = [f"`{label}`: {ROWS[label].note}." for label in methods if ROWS[label].note]
    never = methods.get(NEVER)
    mean = "" if never is None else f"; the mean of their weights has {loss(never.spread('val_loss'))}"
    picture = asked.pictures.get(f"bytes-{part}", "")
    return joined(
        f"## The {part} regime, at equal tokens",
        paragraph(
            f"{world.workers} workers, {format_count(summary['parameters'])} parameters over bytes,",
            f"{case.base.run.steps} steps of {data.batch_size} sequences of {case.base.model.shape().context} bytes a",
            f"worker before tuning, {format_count(summary['tokens'])} tokens in all, the source of Python's standard",
            f"library. Seeds {', '.join(map(str, seeds))}: mean and 95 % interval (Student's t), nats a token;",
            "*behind* and *ahead*: seed by seed. Within a seed all rows have the same first weights and the same data.",
        ),
        f"<!-- job: {part} regime, tuned -->\n" + table(heads, [_row(row, methods, len(seeds)) for row in ordered]),
        paragraph(
            "*validation loss*: of the one model of the run; of `none`, workers that never talk, the mean of their",
            f"own{mean}. *memory*: bytes a parameter of a worker at its fullest (weights, gradients, inner optimizer,",
            f"method; no activations), from the dry run of the {REFERENCE.size} model.",
        ),
        points(notes),
        f"![loss against bytes]({picture})" if picture else "",
    )


def _row(row: Figures, methods: Methods, wanted: int) -> list[str]:
    sent, reference = row.spread("bytes_sent_per_worker"), row.spread("ddp_bytes_per_worker")
    assert sent is not None and reference is not None
    never = methods.get(NEVER)
    return [
        f"`{row.label}`" + ("" if len(row.rows) == wanted else f" ({len(row.rows)} of {wanted} seeds)"),
        loss(row.spread("val_loss")) if row.label != NEVER else loss(Spread.of(row.loss.values())),
        loss(row.spread("val_loss_replicas")),
        gap(row, methods.get("ddp")),
        "-" if never is None or never is row else interval(behind(never, row)),
        format_bytes(sent.mean),
        format_percent(sent.mean / reference.mean) if reference.mean else "-",
        f"{row.memory:.1f}",
    ]


def _clocks(part: str, methods: Methods) -> str:
    """Losses at equal steps; hours as 1B, and losses when the fastest row of all workers has ended;
    and who is beaten by nobody.
    """
    rows = {label: row for label, row in methods.items() if label != ALONE}
    if not rows:
        return ""
    fewest = min(case.config.run.steps for row in rows.values() for case in row.cases.values())
    heads, ends = ["row", "steps", f"loss after {fewest:,} steps"], dict[str, float]()
    for links, words in TOPOLOGIES.items():
        found = [seconds for row in rows.values() if (seconds := row.priced("virtual_seconds", links)) is not None]
        if found:
            ends[links] = min(found)
            heads += [f"time, {words}", f"loss after {format_seconds(ends[links])}"]
    lines = [[f"`{label}`", *_clock(row, fewest, ends)] for label, row in rows.items()]
    early = {label: Spread.of(row.loss_after(fewest / _steps(row))).mean for label, row in rows.items()}
    slow = [label for label, one in early.items() if one > early.get(NEVER, one) + ALIKE]
    fronts = [
        f"over {words}: {named(front(rows.values(), links))}" for links, words in TOPOLOGIES.items() if links in ends
    ]
    return joined(
        f"### Equal steps, and as {AS} equal wall-clock",
        paragraph(
            "The batch was searched for each row, so steps differ at equal tokens. Time: what the run takes",
            f"where messages and steps are those of {AS} on H100s (`--as {AS}`, {AS_TOKENS:,} tokens of a step",
            "before tuning). Losses before the end are read off between two validations, at a rate that still",
            "falls: they say less of a row that takes longer.",
        ),
        f"<!-- job: {part} regime, tuned, after {fewest:,} steps -->\n" + table(heads, lines),
        paragraph(
            f"Behind workers that never talk after {fewest:,} steps, for these end there and their rate has fallen by",
            f"then: {named(slow)}.",
        )
        if slow
        else "",
        paragraph("Beaten by no other row in loss, hours and bytes at once (Pareto):", "; ".join(fronts) + "."),
    )


def _steps(row: Figures) -> int:
    return next(iter(row.cases.values())).config.run.steps


def _clock(row: Figures, fewest: int, ends: Mapping[str, float]) -> list[str]:
    steps = _steps(row)
    cells = [f"{steps:,}", loss(Spread.of(row.loss_after(fewest / steps)))]
    for links, seconds in ends.items():
        whole = row.priced("virtual_seconds", links)
        cells += (
            ["-", "-"] if whole is None else [format_seconds(whole), loss(Spread.of(row.loss_after(seconds / whole)))]
        )
    return cells


def _losers(methods: Methods) -> str:
    reference, never = methods.get("ddp"), methods.get(NEVER)
    gaps = {label: behind(row, reference) for label, row in methods.items() if reference and row is not reference}
    losing = sorted(
        ((label, one.mean) for label, one in gaps.items() if one is not None and one.mean > BEHIND and label in WHY),
        key=lambda pair: -pair[1],
    )
    over = {label: behind(never, row) for label, row in methods.items() if never and row is not never}
    worse = [label for label, one in over.items() if one is not None and one.mean + one.half < 0]
    same = [label for label, one in over.items() if one is not None and abs(one.mean) <= one.half]
    return joined(
        "### What loses, and why",
        points([f"`{label}`, {mean:.2f} behind `ddp`: {WHY[label]}." for label, mean in losing]),
        paragraph(f"Worse than workers that never talk: {named(worse)}; not told apart from them: {named(same)}.")
        if over
        else "",
    )


def _claims(judged: Sequence[Judged]) -> str:
    if not judged:
        return ""
    rows = [
        [
            one.claim.words,
            one.claim.source,
            "-" if one.found is None else f"{one.found.mean + one.claim.margin:+.3f} ± {one.found.half:.3f}",
            f"{one.p:.2g}",
            one.verdict,
        ]
        for one in judged
    ]
    kept = sum(one.verdict == "holds" for one in judged)
    return joined(
        "### Who beats whom",
        paragraph(
            "Claims with a margin in nats a token, chosen beforehand. The difference is the second's loss less the",
            "first's: mean and 95 % interval, seed by seed. p: of that difference from the margin, after Holm's",
            "correction over all claims of this page; at 0.05 or more the claim is *open*.",
            f"{kept} of {len(judged)} hold.",
        ),
        table(["claim", "who says so", "difference", "p", "verdict"], rows, names=2),
    )
