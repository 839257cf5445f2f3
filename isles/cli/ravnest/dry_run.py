"""`isles train --dry-run` of a run in clusters: in words, or as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isles.training.clustered.dry import ClusteredRun
    from isles.training.config.sections import Config


def planned(config: Config) -> ClusteredRun:
    """The plan of `config`; nothing is started or written."""
    from isles.training.clustered.dry import dry_clusters

    return dry_clusters(config)


def print_plan(plan: ClusteredRun) -> None:
    """In words."""
    from isles.cli.table import print_table
    from isles.report.panels import Table
    from isles.report.units import format_bytes, format_count, format_seconds

    clusters = 1 + max(seat.cluster for seat in plan.seats)
    print(
        f"{plan.method}, {len(plan.seats)} workers = {clusters} clusters of asynchronous stages, {plan.steps} steps, "
        f"{plan.backend} backend; {format_count(plan.parameters)} parameters, {format_count(plan.tokens_per_step)} "
        "tokens a step of all clusters\n"
    )
    heads = ["rank", "cluster", "stage", "blocks", "parameters", "versions", "memory", "sends a step", "an average"]
    rows = [
        [
            str(seat.rank),
            str(seat.cluster),
            str(seat.stage),
            f"{seat.blocks[0]} to {seat.blocks[1] - 1}",
            format_count(seat.parameters),
            str(seat.versions),
            format_bytes(seat.memory),
            format_bytes(seat.bytes_a_step),
            format_bytes(seat.bytes_an_average),
        ]
        for seat in plan.seats
    ]
    print_table(Table(heads=heads, rows=rows, names=0))
    if plan.aside:
        print(f"\nworkers beside these that stand by for who is lost: {plan.aside}")
    mean = sum(plan.bytes_sent) / len(plan.bytes_sent)
    print(
        f"\n{plan.averages} averages over {plan.segments} segments; {format_bytes(mean)} a worker in the whole run, "
        "validations and the start left out; memory is counted, activations included"
    )
    seconds = [seat.seconds for seat in plan.seats if seat.seconds is not None]
    if seconds:
        print(f"a step takes {format_seconds(max(seconds))} or more: what the slowest stage computes")
    print()
