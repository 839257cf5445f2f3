"""The page's section on model sizes."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.comparison.cases import LADDER_ROWS, TOKENS_A_PARAMETER, Key
from benchmarks.comparison.figures import Figures
from benchmarks.comparison.text import gap, joined, loss, paragraph, table
from isles.report.units import format_count

Ladder = Mapping[Key, Figures]
"""By row and size."""


def ladder_section(ladder: Ladder, picture: str) -> str:
    """What was run, the table, the picture."""
    some = next(iter(ladder.values()))
    seeds = sorted({seed for row in ladder.values() for seed in row.rows})
    world = next(iter(some.cases.values())).config.world
    reference, *others = LADDER_ROWS
    heads = ["size", "parameters", "tokens", *(f"`{name}`" for name in LADDER_ROWS)]
    heads += [f"`{name}` behind `{reference}`" for name in others]
    sizes = list(dict.fromkeys(size for _, size in ladder))
    return joined(
        "## The gap against size",
        paragraph(
            f"{TOKENS_A_PARAMETER} tokens a parameter, {world.workers} workers, settings tuned at each size. Seeds",
            f"{', '.join(map(str, seeds))}: mean and 95 % interval, gaps seed by seed. Reported, not asserted.",
            "The abstract of DiLoCo's scaling laws (arXiv 2503.09799) says that tuned DiLoCo scales better with size",
            "than data parallel, and can be ahead of it at small sizes, too; its tables could not be read.",
        ),
        table(heads, [_size_row(size, ladder) for size in sizes]),
        f"![gap to data parallel against size]({picture})" if picture else "",
    )


def _size_row(size: str, ladder: Ladder) -> list[str]:
    cells = [ladder.get((name, size)) for name in LADDER_ROWS]
    some = next(cell for cell in cells if cell is not None)
    summary = next(iter(some.rows.values()))["summary"]
    losses = [loss(None if cell is None else cell.spread("val_loss")) for cell in cells]
    reference, *others = cells
    counts = (format_count(summary["parameters"]), format_count(summary["tokens"]))
    return [size, *counts, *losses, *(gap(cell, reference) for cell in others)]
