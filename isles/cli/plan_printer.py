"""`isles train --dry-run`: print what a run will be, in any kind of world. What is not known is not printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

from isles.base.errors import as_typed
from isles.cli.terminal import aligned
from isles.models.sizes import SIZES
from isles.plan.run_plan import plan_run
from isles.report.units import compare, format_bytes, format_count, format_percent, format_seconds, format_short
from isles.training.config.trust import names_of

if TYPE_CHECKING:
    from isles.network.exchange_plan import PlannedExchange
    from isles.plan.record import RunPlan, RunTime
    from isles.training.config.sections import Config

_LABEL = 12  # characters of the left column
_NAMED = 3  # groups of a round, or ranks, that are named
_SHOWN = ("replicas.method", "model.factory", "model.options")  # in other lines of the head


def show(config: Config, *, probe: bool, as_json: bool, machines: int = 1, machine: str = "") -> None:
    """Print the plan of `config`; nothing is started or written."""
    plan = plan_run(config, probe=probe, machines=machines, machine=machine)
    if as_json:
        print(json.dumps(plan.as_json(), indent=2))
        return
    for notice in plan.notices:
        print(f"note: {notice}", file=sys.stderr)
    for block in (_head, _memory, _placed, _fits, _workers, _exchanges, _costs):
        lines = [
            f"{'' if number else label:<{_LABEL}}{line}"
            for label, part in block(plan).items()
            for number, line in enumerate(part)
        ]
        if lines:
            print("\n".join(lines), end="\n\n")
    print("dry run: nothing was started or written")


def _head(plan: RunPlan) -> dict[str, list[str]]:
    config, steps, tokens = plan.config, plan.config.run.steps, plan.tokens_per_step
    model = config.model.factory or config.model.hf or config.model.size
    if config.model.own is None and config.model.shape() != SIZES[str(config.model.size)]:
        model = "a decoder of your own numbers"
    workers = f"{plan.size} workers{f' = {plan.placement}' if plan.placement else ''}"
    flops = "" if plan.flops is None else f", {format_short(plan.flops)} FLOPs a token (with backward)"
    own = [f"{key} = {as_typed(value)}" for key, value in names_of(config).items() if key not in _SHOWN]
    return {
        "method": [f"{config.method}, {workers}, {steps} steps, {config.world.backend} backend"],
        "your own": own,
        "model": [f"{model}: {format_count(plan.parameters)} parameters{flops}"],
        "tokens": [f"{format_count(tokens)} a step of all workers, {format_count(tokens * steps)} in all"],
    }


def _memory(plan: RunPlan) -> dict[str, list[str]]:
    """Of the fullest worker."""
    memory, on = plan.fullest.memory, f"on {plan.device}"
    when = {"exchange": "host, from the first exchange on", "end": "host, when validating, and at the end", "step": on}
    rows = [("weights", memory.weights, on), ("gradients", memory.gradients, on), ("inner optimizer", memory.inner, on)]
    rows[1:1] = [("tables of the model", memory.tables, on)] if memory.tables else []
    rows += [(held.what, held.nbytes, when.get(held.when, "host")) for held in memory.held]
    counted = "with" if _has_activations(plan) else "without"
    rows.append(("at the peak", memory.peak, f"{counted} activations{', of the fullest' if plan.is_staged else ''}"))
    return {"memory": aligned([(what, f"{format_bytes(nbytes):>8}", where) for what, nbytes, where in rows], (0, 2))}


def _has_activations(plan: RunPlan) -> bool:
    return any(held.what == "activations" for held in plan.fullest.memory.held)


def _placed(plan: RunPlan) -> dict[str, list[str]]:
    """The model's blocks, where a plan of memory places them."""
    found = plan.placed
    if found is None:
        return {}
    beside = f", {format_bytes(found.host_bytes)} of the host"
    beside += f", {format_bytes(found.disk_bytes)} of disk" if found.disk_bytes else ""
    on = f" on {found.machine}" if found.machine else ""
    step = f"a step of {format_seconds(found.step)}{on}, simulated"
    chosen = f"{found.short} ({found.method}, {found.update} updates)"
    return {"blocks": [chosen, f"at the peak {format_bytes(found.peak)}{beside}; {step}"]}


def _fits(plan: RunPlan) -> dict[str, list[str]]:
    fit = plan.fit
    if fit is None:
        return {}
    of = f" ({format_bytes(fit.activations)} of activations)" if fit.activations is not None else ""
    if fit.activations is None and plan.placed is None and not _has_activations(plan):
        of = " (without activations)"  # the model could not be profiled
    needs = f"{format_bytes(fit.device_bytes)}{of} on a device of {format_bytes(fit.device_room)}"
    if fit.host_room:
        needs += f", {format_bytes(fit.host_bytes)} on a host of {format_bytes(fit.host_room)}"
    if fit.fits:
        return {"fits": [f"{fit.machine}: {needs}"]}
    mend = f"would fit: {'; or '.join(fit.suggestions)}" if fit.suggestions else "a smaller model, or more machines"
    return {"too large": [f"for {fit.machine}: {needs}", mend]}


_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("rank", "ranks", lambda ranks: " ".join(_some([str(rank) for rank in ranks]))),
    ("cluster", "cluster", str),
    ("stage", "stage", str),
    ("blocks", "blocks", lambda cut: str(cut[0]) if cut[1] == cut[0] + 1 else f"{cut[0]} to {cut[1] - 1}"),
    ("parameters", "parameters", format_count),
    ("versions", "versions", str),
    ("microbatches", "microbatches", lambda count: str(count) if isinstance(count, int) else f"{count:.1f}"),
    ("memory", "memory", lambda memory: format_bytes(memory.peak)),
    ("forwards in flight", "forwards", str),
    ("saved inputs", "saved", format_bytes),
    ("sends a step", "step_bytes", format_bytes),
    ("sent per average", "average_bytes", format_bytes),
)
"""Of workers that hold stages: head, field of a `WorkerPlan` (None for all workers or for none), its text."""


def _workers(plan: RunPlan) -> dict[str, list[str]]:
    if not plan.is_staged:
        return {}
    known = [column for column in _COLUMNS if getattr(plan.workers[0], column[1]) is not None]
    rows = [[text(getattr(worker, key)) for _, key, text in known] for worker in plan.workers]
    pipeline = plan.config.pipeline
    routes = f"{pipeline.microbatches} microbatches, {pipeline.routing} routes; validations send more, uncounted"
    standby = [f"on standby for lost ones, beside these: {plan.standby}"] if plan.standby else []
    return {"workers": [*aligned([[head for head, _, _ in known], *rows]), routes, *standby]}


def _exchanges(plan: RunPlan) -> dict[str, list[str]]:
    outline, steps = plan.outline, plan.config.run.steps
    if outline is None:
        return {}
    rows = [["after step", "lands", "what", "who with whom", "a worker sends"]]
    rows.append(["0", "0", "weights, hashes", "from worker 0", _spread(outline.opening)])
    for one in outline.first:
        moments = [str(min(ceil(moment), steps)) for moment in (one.sent, one.lands)]
        rows.append([*moments, f"{one.what} {one.fragment or ''}".strip(), _who(one), _spread(one.bytes_sent)])
    lines = aligned(rows, (2, 3, 4))
    if outline.rounds:
        each = format_bytes((max(outline.sent) - outline.inside) / outline.rounds)
        often = "step" if outline.every == 1 else f"{outline.every} steps"
        rounds = f"{format_count(outline.rounds)} rounds in all, one every {often}"
        lines.append(f"... {rounds}; a worker sends {each} a round")
    return {"exchanges": lines}


def _who(planned: PlannedExchange) -> str:
    if len(planned.groups) == 1:
        return "all" if len(planned.groups[0]) > 1 else "alone"
    names = [" ".join(map(str, group)) if len(group) > 1 else f"{group[0]} alone" for group in planned.groups]
    return ", ".join(_some([f"({name})" for name in names]))


def _some(names: list[str]) -> list[str]:
    return [*names[:_NAMED], f"and {len(names) - _NAMED} more"] if len(names) > _NAMED else names


def _spread(nbytes: Sequence[float]) -> str:
    least, most = format_bytes(min(nbytes)), format_bytes(max(nbytes))
    return most if least == most else f"{least} to {most}"


def _costs(plan: RunPlan) -> dict[str, list[str]]:
    """Bytes and time."""
    found, time, outline, each = {"bytes": _bytes(plan)}, plan.time, plan.outline, plan.step_seconds
    if time is not None and plan.is_staged:
        found["step"] = _staged(plan, time)
    elif plan.workers[0].seconds is not None:
        least = max(worker.seconds or 0.0 for worker in plan.workers)
        found["step"] = [f"{format_seconds(least)} or more: what the slowest stage computes"]
    if plan.startup:
        found["start-up"] = [f"{format_seconds(plan.startup)} until worker 0's weights are at all workers"]
    if outline is None or not outline.rounds:
        return found
    every = f"{outline.every} step{'s' if outline.every > 1 else ''} between two rounds"
    if each is None:
        return found | {"time": [f"{every}; how long a step takes is not known: add --probe to measure it here"]}
    source = "world.virtual.step_seconds" if plan.config.world.is_simulated else "measured here, one worker alone"
    source = "the plan's way of it, first task to last" if plan.is_by_paths else source
    found["time"] = [f"{every}: {format_seconds(outline.every * each)} ({format_seconds(each)} a step, {source})"]
    return found if time is None else found | {"links": _links(plan, time)}


def _bytes(plan: RunPlan) -> list[str]:
    lines, outline = [], plan.outline
    if plan.bytes_sent:
        mean, ddp = sum(plan.bytes_sent) / plan.size, plan.ddp_bytes
        against = "" if ddp is None else f" data parallel's {format_bytes(ddp)}"
        against = f", {compare(mean, ddp)}{against}" if mean and ddp else against
        about = "about " if outline is not None and outline.about else ""
        lines.append(f"{about}{format_bytes(mean)} a worker in the whole run{against}")
    if plan.between_stages is not None:
        ratio = plan.stream_ratio or 1.0
        fewer = f", 1/{ratio:.3g} of the whole stream's" if ratio > 1 else ""
        lines.append(f"{format_bytes(plan.between_stages)} of that to other stages, on average{fewer}")
    if outline is not None and outline.inside:
        whose = "replica, for norms and gradients" if plan.is_staged else "island, the rest across"
        lines.append(f"{format_bytes(outline.inside)} of that inside its {whose}")
    if plan.microbatch_bytes is not None and plan.swarm_bytes is not None:
        each, whole = format_bytes(plan.microbatch_bytes), format_bytes(plan.swarm_bytes)
        lines.append(f"{each} a microbatch and {whole} a step of all, while no peer is lost or late")
    if plan.averages is not None:
        lines.append(f"{plan.averages} averages over {plan.segments} segments; the start is not counted")
    return lines


def _staged(plan: RunPlan, time: RunTime) -> list[str]:
    """What a step of stages takes, exchanges included."""
    if time.account is None or time.step is None or time.bubble is None:
        return []
    computing = f"{format_seconds(time.account.computing / plan.config.run.steps)} of computing a worker"
    if plan.is_by_paths and plan.step_seconds is not None:
        computing = f"{format_seconds(plan.step_seconds)} from its first task to its last"
    waits = f"{format_percent(time.bubble)} of the time waiting for other stages (the bubble)"
    if time.reached is None:
        return [f"{format_seconds(time.step)} of the clock, {computing};", waits]
    waits = f"{format_percent(time.account.share)} computing, the rest waiting for other peers"
    reached = f"{100 * time.reached:.0f} % of what the peers of the slowest stage can do together"
    return [f"{format_seconds(time.step)} of the clock, {computing};", waits, reached]


def _links(plan: RunPlan, time: RunTime) -> list[str]:
    lines = []
    if time.round_wait is not None and time.rate is not None and time.utilisation is not None:
        link = f"{_rate(time.rate)} up, {format_seconds(time.latency or 0.0)} one way"
        waits = f"waits {format_seconds(time.round_wait)} a round, {format_percent(time.utilisation)} computing"
        lines.append(f"{link}: {waits}")
    if plan.is_staged or plan.outline is None or max(plan.outline.sent) <= plan.outline.inside:
        return lines
    if time.wanted is None:
        return [*lines, "95 % computing is out of reach at any rate: latency, or slower workers, cost more"]
    return [*lines, f"for 95 % computing a worker's upload wants {_rate(time.wanted)}"]


def _rate(bits_per_second: float) -> str:
    return format_bytes(bits_per_second).replace("B", "bit") + "/s"
