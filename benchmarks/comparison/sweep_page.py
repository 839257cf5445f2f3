"""The page's section on model sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.comparison.cases import SWEPT
from benchmarks.comparison.figures import Figures, differences
from benchmarks.comparison.text import gap, joined, loss, paragraph, points, table
from isles.report.units import format_count

Sweep = Mapping[tuple[str, ...], Figures]

_ON_A_GPU = joined(
    paragraph(
        "The paper's smallest sizes are for a GPU, and are not among these runs. The same on one (with `--dry-run`,",
        "only what it will be):",
    ),
    "    python -m benchmarks.comparison --parts scaling --sizes eager-35M,eager-100M --device cuda \\\n"
    "        --scaling-steps 5000 --set data.path=TEXT --set data.tokenizer=FOLDER --set model.context=1024 \\\n"
    "        --set model.autocast=bf16",
)


def sweep_section(sweep: Sweep, seeds: Sequence[int], picture: str) -> str:
    """What was run, the table, whether each gap closes, the picture."""
    some = next(iter(sweep.values()))
    config, tokens = next(iter(some.cases.values())).config, next(iter(some.summaries.values()))["tokens"]
    world, run, data = config.world, config.run, config.data
    reference, *others = SWEPT
    heads = ["size", "parameters", "learning rate", *(f"`{name}`" for name in SWEPT)]
    heads += [f"`{name}` behind `{reference}`" for name in others]
    sizes = list(dict.fromkeys(size for _, size in sweep))
    return joined(
        "## The gap against size",
        paragraph(
            "Does the distance to data parallel close as models grow, as in table 6 of Eager Updates (arXiv",
            f"2502.12996)? There it is 0.11 at 35M and 0.01 at 1B for eager. Here: {world.workers} workers,",
            f"{run.steps} steps of {data.batch_size} sequences of {config.model.shape().context} bytes a worker, so",
            f"that all sizes see the same {format_count(tokens)} tokens; H = {_every(sweep)}, outer rates from the",
            "embedded tables, streaming with its transfers behind one inner step; the learning rate falls as one",
            f"over the width. Seeds {', '.join(map(str, seeds))}, mean ± standard deviation, gaps seed by seed.",
            "Larger models are further from the end of their training here, which the paper's are not. Reported,",
            "not asserted.",
        ),
        table(heads, [_size_row(size, sweep) for size in sizes]),
        points([_trend(name, sizes, sweep) for name in others] if len(sizes) > 1 else []),
        f"![gap to data parallel against size]({picture})" if picture else "",
        "" if config.model.device == "cuda" else _ON_A_GPU,
    )


def _size_row(size: str, sweep: Sweep) -> list[str]:
    cells = {name: sweep.get((name, size)) for name in SWEPT}
    some = next(cell for cell in cells.values() if cell is not None)
    rate = next(iter(some.cases.values())).config.inner.lr
    parameters = next(iter(some.summaries.values()))["parameters"]
    losses = [loss(None if cell is None else cell.spread("val_loss")) for cell in cells.values()]
    reference, *others = cells.values()
    return [size, format_count(parameters), f"{rate:.2g}", *losses, *(gap(cell, reference) for cell in others)]


def _every(sweep: Sweep) -> str:
    """H, of those that have it."""
    settings = [case.config.replicas for row in sweep.values() for case in row.cases.values()]
    return ", ".join(str(one) for one in sorted({one.sync_every for one in settings if hasattr(one, "sync_every")}))


def _trend(name: str, sizes: Sequence[str], sweep: Sweep) -> str:
    """Whether the gap of the last size is below that of the first, in the seeds that have both."""
    first, last = (_gaps(name, size, sweep) for size in (sizes[0], sizes[-1]))
    changes = [last[seed] - first[seed] for seed in first.keys() & last.keys()]
    if not changes:
        return f"`{name}`: no seed has both {sizes[0]} and {sizes[-1]} yet."
    smaller, mean = sum(change < 0 for change in changes), sum(changes) / len(changes)
    way = f"from {sizes[0]} to {sizes[-1]} the gap changes by {mean:+.3f} in the mean"
    return f"`{name}`: {way}; it gets smaller in {smaller} of {len(changes)} seeds."


def _gaps(name: str, size: str, sweep: Sweep) -> dict[int, float]:
    row, reference = sweep.get((name, size)), sweep.get((SWEPT[0], size))
    return {} if row is None or reference is None else differences(row, reference)
