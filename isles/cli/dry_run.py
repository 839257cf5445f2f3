"""`isles train --dry-run`: the plan of a run in words, or as JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

from isles.cli.table import print_table
from isles.models.sizes import SIZES
from isles.report.panels import Table
from isles.report.units import compare, format_bytes, format_count, format_percent, format_seconds, format_short
from isles.schema import BACKENDS
from isles.training.clustered.dry import ClusteredRun, ClusterSeat, dry_clusters
from isles.training.dry_run import DryRun, dry_run, refuse
from isles.training.swarmed.dry import SwarmRun, SwarmSeat, dry_swarm

if TYPE_CHECKING:
    from isles.network.planner.planned import PlannedExchange
    from isles.training.config.sections import Config
    from isles.training.dry_time import Transfers

_LABEL = 12  # characters of the left column
_GROUPS = 3  # groups of a round that are named


def show(config: Config, *, probe: bool, as_json: bool, machines: int = 1) -> None:
    """Print the plan of `config`; nothing is started or written."""
    plan = _planned(config, probe, machines)
    if as_json:
        print(json.dumps(plan.as_json(), indent=2))
        return
    for notice in plan.notices:
        print(f"note: {notice}", file=sys.stderr)
    if isinstance(plan, ClusteredRun):
        _print_clusters(plan)
    elif isinstance(plan, SwarmRun):
        _print_swarm(plan)
    else:
        _print(config, plan)
    print("dry run: nothing was started or written")


def _planned(config: Config, probe: bool, machines: int) -> DryRun | ClusteredRun | SwarmRun:
    of_stages = {"ravnest": dry_clusters, "swarm": dry_swarm}.get(config.pipeline.routing)
    if of_stages is None:
        return dry_run(config, probe=probe, machines=machines)
    if probe:
        raise ValueError("--probe: measures a whole model's step, and these workers hold stages; leave it out")
    refuse(config)
    return of_stages(config)


def _print(config: Config, planned: DryRun) -> None:
    before = (_head(config, planned), _memory(planned), _placed(planned), _stages(config, planned), _nodes(planned))
    for block in (*before, _exchanges(planned), _cost(planned)):
        if block:
            print("\n".join(block), end="\n\n")


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}"


def _head(config: Config, plan: DryRun) -> list[str]:
    model = config.model.factory or config.model.hf or config.model.size
    if config.model.own is None and config.model.shape() != SIZES[str(config.model.size)]:
        model = "a decoder of your own numbers"
    flops = "FLOPs not counted" if plan.flops is None else f"{format_short(plan.flops)} FLOPs a token (with backward)"
    made_of = ""
    if plan.nodes:
        counts = Counter(node.stage for node in plan.nodes)
        made_of = f" = stages of {', '.join(str(counts[stage]) for stage in sorted(counts))} by a plan"
    elif plan.stages:
        inner = f" x {config.world.inner} inside" if config.world.inner > 1 else ""
        made_of = f" = {config.replicas_in_all} replicas x {len(plan.stages)} stages{inner}"
    return [
        _line("method", f"{plan.method}, {plan.workers} workers{made_of}, {plan.steps} steps, {plan.backend} backend"),
        _line("model", f"{model}: {format_count(plan.parameters)} parameters, {flops}"),
        _line(
            "tokens",
            f"{format_count(plan.tokens_per_step)} a step of all workers, "
            f"{format_count(plan.tokens_per_step * plan.steps)} in all",
        ),
    ]


def _memory(plan: DryRun) -> list[str]:
    own = (
        [("weights", plan.weights), ("tables of the model", plan.tables)]
        if plan.tables
        else [("weights", plan.weights)]
    )
    own += [("gradients", plan.gradients), ("inner optimizer", plan.inner)]
    when = {"exchange": "from the first exchange on", "end": "when validating, and at the end"}
    rows = [(what, nbytes, f"on {plan.device}") for what, nbytes in own]
    rows += [(held.what, held.nbytes, ", ".join(filter(None, ("host", when.get(held.when))))) for held in plan.held]
    fullest = ", of the fullest stage" if plan.stages else ""
    rows.append(("at the peak", plan.peak, f"without activations{fullest}"))
    width = max(len(what) for what, _, _ in rows)
    lines = [f"{what:<{width}}  {format_bytes(nbytes):>8}  {where}" for what, nbytes, where in rows]
    return [_line("memory" if line is lines[0] else "", line) for line in lines]


def _placed(plan: DryRun) -> list[str]:
    """Its blocks, where a plan of memory places them."""
    found = plan.placed
    if found is None:
        return []
    beside = [f"{format_bytes(found.host_bytes)} of the host", f"{format_bytes(found.disk_bytes)} of disk"]
    words = ", ".join([format_bytes(found.peak), *(beside if found.disk_bytes else beside[:1])])
    on = f" on {found.machine}" if found.machine else ""
    return [
        _line("blocks", f"{found.short} ({found.method}, {found.update} updates)"),
        _line("", f"at the peak {words}; a step of {format_seconds(found.step)}{on}, simulated"),
    ]


def _stages(config: Config, plan: DryRun) -> list[str]:
    rows = [["stage", "blocks", "parameters", "memory", "forwards kept", "of what came", "sends a step"]]
    for number, stage in enumerate(plan.stages):
        first, stop = stage.blocks
        numbers = (stage.memory.peak, stage.kept, stage.bytes_a_step)
        peak, kept, sent = map(format_bytes, numbers)
        blocks = str(first) if stop == first + 1 else f"{first} to {stop - 1}"
        rows.append([str(number), blocks, format_count(stage.parameters), peak, str(stage.forwards), kept, sent])
    if len(rows) == 1:
        return []
    lines = _right(rows)
    pipeline = config.pipeline
    lines.append(f"{pipeline.microbatches} microbatches, {pipeline.routing} routes; validations send more, uncounted")
    return [_line("stages" if line is lines[0] else "", line) for line in lines]


def _nodes(plan: DryRun) -> list[str]:
    """Those of a plan of paths."""
    rows = [["node", "stage", "microbatches", "memory", "forwards kept", "of what came", "sends a step"]]
    for number, node in enumerate(plan.nodes):
        memory, kept, sent = map(format_bytes, (node.memory, node.kept, node.bytes_a_step))
        rows.append([str(number), str(node.stage), str(node.visits), memory, str(node.forwards), kept, sent])
    lines = _right(rows) if plan.nodes else []
    return [_line("nodes" if line is lines[0] else "", line) for line in lines]


def _right(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, its columns flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _exchanges(plan: DryRun) -> list[str]:
    outline = plan.outline
    rows = [["after step", "lands", "what", "who with whom", "a worker sends"]]
    rows.append(["0", "0", "weights, hashes", "from worker 0", _spread(outline.opening)])
    for planned in outline.first:
        what = planned.what if not planned.fragment else f"{planned.what} {planned.fragment}"
        moments = [str(min(ceil(moment), plan.steps)) for moment in (planned.sent, planned.lands)]
        rows.append([*moments, what, _who(planned), _spread(planned.bytes_sent)])
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        "  ".join((a.rjust(widths[0]), b.rjust(widths[1]), c.ljust(widths[2]), d.ljust(widths[3]), e)).rstrip()
        for a, b, c, d, e in rows
    ]
    if outline.rounds:
        each = format_bytes((max(outline.sent) - outline.inside) / outline.rounds)
        often = "step" if outline.every == 1 else f"{outline.every} steps"
        lines.append(
            f"... {format_count(outline.rounds)} rounds in all, one every {often}; a worker sends {each} a round"
        )
    return [_line("exchanges" if line is lines[0] else "", line) for line in lines]


def _who(planned: PlannedExchange) -> str:
    if len(planned.groups) == 1:
        return "all" if len(planned.groups[0]) > 1 else "alone"
    names = [" ".join(map(str, group)) if len(group) > 1 else f"{group[0]} alone" for group in planned.groups]
    more = [f"and {len(names) - _GROUPS} more"] if len(names) > _GROUPS else []
    return ", ".join([*(f"({name})" for name in names[:_GROUPS]), *more])


def _spread(nbytes: Sequence[float]) -> str:
    least, most = format_bytes(min(nbytes)), format_bytes(max(nbytes))
    return most if least == most else f"{least} to {most}"


def _cost(plan: DryRun) -> list[str]:
    mean = sum(plan.bytes_sent) / plan.workers
    against = f", {compare(mean, plan.ddp_bytes)}" if mean and plan.ddp_bytes else ""
    sends = f"{format_bytes(mean)} a worker in the whole run{against} data parallel's {format_bytes(plan.ddp_bytes)}"
    lines = [_line("bytes", f"about {sends}" if plan.outline.about else sends)]
    if plan.stages:
        ratio = plan.stream_ratio or 1.0
        fewer = f", 1/{ratio:.3g} of the whole stream's" if ratio > 1 else ""
        lines.append(_line("", f"{format_bytes(plan.between_stages)} of that to other stages, on average{fewer}"))
    if plan.outline.inside:
        whose = "replica, for norms and gradients" if plan.stages else "island, the rest across"
        lines.append(_line("", f"{format_bytes(plan.outline.inside)} of that inside its {whose}"))
    if plan.stages and plan.transfers is not None and plan.transfers.step is not None:
        lines += _pipelined(plan, plan.transfers)
    if not plan.outline.rounds:
        return lines
    every = f"{plan.outline.every} step{'s' if plan.outline.every > 1 else ''} between two rounds"
    if plan.step_seconds is None:
        return [*lines, _line("time", f"{every}; how long a step takes is not known: add --probe to measure it here")]
    if plan.nodes:
        source = "the plan's way of it, first task to last"
    else:
        source = "world.step_seconds" if BACKENDS[plan.backend].is_simulated else "measured here, one worker alone"
    computing = plan.outline.every * plan.step_seconds
    lines.append(
        _line("time", f"{every}: {format_seconds(computing)} ({format_seconds(plan.step_seconds)} a step, {source})")
    )
    transfers = plan.transfers
    if transfers is None:
        return lines
    if transfers.seconds is not None and transfers.rate is not None and transfers.utilisation is not None:
        link = f"{_rate(transfers.rate)} up, {format_seconds(transfers.latency or 0.0)} one way"
        waits = f"waits {format_seconds(transfers.seconds)} a round, {format_percent(transfers.utilisation)} computing"
        lines.append(_line("links", f"{link}: {waits}"))
    if plan.stages:
        return lines
    if transfers.wanted is None:
        return [*lines, _line("", "95 % computing is out of reach at any rate: the latency alone costs more")]
    return [*lines, _line("", f"for 95 % computing a worker's upload wants {_rate(transfers.wanted)}")]


def _pipelined(plan: DryRun, transfers: Transfers) -> list[str]:
    """What a step takes, exchanges included."""
    if plan.step_seconds is None or transfers.step is None or transfers.bubble is None:
        return []
    waits = f"{format_percent(transfers.bubble)} of the time waiting for other stages (the bubble)"
    if plan.nodes:
        by_plan = f"{format_seconds(plan.step_seconds)} from its first task to its last;"
        return [_line("step", f"{format_seconds(transfers.step)} of the clock, {by_plan}"), _line("", waits)]
    each = plan.step_seconds / len(plan.stages)
    return [
        _line("step", f"{format_seconds(transfers.step)} of the clock, {format_seconds(each)} of computing a worker;"),
        _line("", waits),
    ]


def _rate(bits_per_second: float) -> str:
    return format_bytes(bits_per_second).replace("B", "bit") + "/s"


def _print_clusters(plan: ClusteredRun) -> None:
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
            *_held(seat),
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


def _print_swarm(plan: SwarmRun) -> None:
    stages = 1 + max(seat.stage for seat in plan.seats)
    print(
        f"{plan.method}, {len(plan.seats)} workers = a swarm of {stages} stages, {plan.steps} steps of "
        f"{plan.microbatches} microbatches, {plan.backend} backend; {format_count(plan.parameters)} parameters, "
        f"{format_count(plan.tokens_per_step)} tokens a step of all\n"
    )
    heads = ["rank", "stage", "blocks", "parameters", "memory", "microbatches a step", "sends a step"]
    rows = [
        [
            str(seat.rank),
            *_held(seat),
            format_bytes(seat.memory),
            "by its speed" if seat.counted is None else f"{seat.counted:.1f}",
            "by its speed" if seat.bytes_sent is None else format_bytes(seat.bytes_sent),
        ]
        for seat in plan.seats
    ]
    print_table(Table(heads=heads, rows=rows, names=0))
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


def _held(seat: ClusterSeat | SwarmSeat) -> list[str]:
    """Its stage, and the blocks and parameters of that."""
    return [str(seat.stage), f"{seat.blocks[0]} to {seat.blocks[1] - 1}", format_count(seat.parameters)]
