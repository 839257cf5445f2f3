"""What the runs will be, before they are made: one line a run."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.comparison.cases import Case
from isles.report.units import format_bytes, format_count, format_short
from isles.training.dry_run import dry_run


def print_plans(cases: Sequence[Case]) -> None:
    """Parameters, tokens, memory and bytes of each, by `isles.training.dry_run`; of the first seed alone, for the
    others are alike. ValueError for what the run itself would refuse.
    """
    first = [case for case in cases if case.seed == cases[0].seed]
    heads = ["run", "device", "parameters", "tokens", "FLOPs, all workers", "memory a worker", "sent by a worker"]
    rows = [heads]
    for case in first:
        one = dry_run(case.config)
        tokens = one.tokens_per_step * one.steps
        flops = "-" if one.flops is None else format_short(one.flops * tokens)
        sent = format_bytes(sum(one.bytes_sent) / one.workers)
        numbers = [format_count(one.parameters), format_count(tokens), flops, format_bytes(one.peak), sent]
        rows.append([" ".join(case.key), one.device, *numbers])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
    seeds = len({case.seed for case in cases})
    print(f"{len(cases)} runs, {seeds} seeds of each line; dry run: nothing was started or written")
