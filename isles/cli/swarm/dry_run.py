"""`isles train --dry-run` of a run in a swarm: in words, or as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isles.training.config.sections import Config
    from isles.training.swarmed.dry import SwarmRun, SwarmSeat


def planned(config: Config) -> SwarmRun:
    """The plan of `config`; nothing is started or written."""
    from isles.training.swarmed.dry import dry_swarm

    return dry_swarm(config)


def print_plan(plan: SwarmRun) -> None:
    """In words."""
    from isles.cli.table import print_table
    from isles.report.panels import Table
    from isles.report.units import format_bytes, format_count, format_seconds

    stages = 1 + max(seat.stage for seat in plan.seats)
    print(
        f"{plan.method}, {len(plan.seats)} workers = a swarm of {stages} stages, {plan.steps} steps of "
        f"{plan.microbatches} microbatches, {plan.backend} backend; {format_count(plan.parameters)} parameters, "
        f"{format_count(plan.tokens_per_step)} tokens a step of all\n"
    )
    heads = ["rank", "stage", "blocks", "parameters", "memory", "microbatches a step", "sends a step"]
    print_table(Table(heads=heads, rows=[_row(seat) for seat in plan.seats], names=0))
    print(
        f"\n{format_bytes(plan.bytes_a_microbatch)} a microbatch and {format_bytes(plan.bytes_a_step)} a step of all, "
        "validations left out; memory without the activations inside of blocks"
    )
    if plan.seconds is not None and plan.reached is not None:
        print(
            f"a step takes about {format_seconds(plan.seconds)}, {100 * plan.reached:.0f} % of what the peers of the "
            "slowest stage can do together, while nobody is lost or late"
        )
    print()


def _row(seat: SwarmSeat) -> list[str]:
    from isles.report.units import format_bytes, format_count

    return [
        str(seat.rank),
        str(seat.stage),
        f"{seat.blocks[0]} to {seat.blocks[1] - 1}",
        format_count(seat.parameters),
        format_bytes(seat.memory),
        "by its speed" if seat.counted is None else f"{seat.counted:.1f}",
        "by its speed" if seat.bytes_sent is None else format_bytes(seat.bytes_sent),
    ]
