"""The sheet of `isles plan --params ...`: which method for which link."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from isles.network.planner.job import Job
from isles.network.planner.planner import Plan, curve
from isles.network.planner.ways import WAYS
from isles.replicas import METHODS
from isles.report.draw.style import SERIES
from isles.report.panels import Chart, Panel, Polyline, Table, plain
from isles.report.sheet import Sheet
from isles.report.units import format_percent, format_short

_SEARCHED = (
    "Rates wanted, and the curves, are searched exchange by exchange: about, without jitter, of the long run. Left "
    "out: the time to encode, and differences in the workers' speed. Memory: AdamW in float32 and what the method "
    "keeps, at its fullest, as --dry-run counts it; without activations."
)


def plan_sheet(job: Job, plans: Sequence[Plan], network: str, *, targets: Sequence[float]) -> Sheet:
    """`plans` as `planner.plan` made them for `targets`. network: its name in words."""
    slowest = job.links.slowest_rate(job.workers)
    pace = f"{_short(slowest / 1e6)} Mbit/s" if math.isfinite(slowest) else "no limit on its rate"
    percents = [f"{100 * target:g}" for target in targets]
    heads = ["method", "settings", "H", "computing %", "waits s/round", "sent MB/step"]
    heads += [f"Mbit/s for {percent} %" for percent in percents] + ["memory GB"]
    heads += ["GPU GB"] if job.device_bytes else []
    heads += ["hours", "sent GB"] if job.tokens else []
    return Sheet(
        name="plan",
        title=f"{format_short(job.parameters)} parameters, {job.workers} workers, {network}",
        subtitle=f"{job.step_seconds:.4g} s of computing a step; the slowest worker has {pace}",
        what=f"First what reaches {percents[0]} % computing: nearest to data parallel first, then the smaller H.",
        table=Table(heads=heads, rows=[_row(job, one, slowest) for one in plans], names=2),
        data={
            "network": network,
            "slowest_mbps": _finite(slowest / 1e6),
            "rows": [_record(job, one, slowest, percents) for one in plans],
        },
        panels=[_panel(job, plans, slowest)] if math.isfinite(slowest) else [],
        notes=[
            _reason(plans, slowest, percents[0]),
            _replayed(job, plans),
            _SEARCHED,
            *device_notes(job, [one.memory.computing for one in plans]),
            f"Not planned: {', '.join(not_planned())}.",
        ],
    )


def not_planned() -> list[str]:
    """The methods that no way stands for."""
    planned = {way.method for way in WAYS}
    return [name for name in METHODS if name not in planned]


def _row(job: Job, one: Plan, slowest: float) -> list[str]:
    cells = [one.way.method, one.way.settings, str(one.every), f"{100 * one.utilisation:.1f}", _short(one.waits)]
    cells.append(_short(one.bytes_a_step / 1e6))
    cells += [_short(factor * slowest / 1e6) for factor in one.wanted]
    cells.append(_short(one.memory.peak / 1e9))
    cells += [on_device(job, one.memory.computing)] if job.device_bytes else []
    if one.hours is not None:
        cells += [_short(one.hours), _short(_total(job, one) / 1e9)]
    return cells


def _record(job: Job, one: Plan, slowest: float, percents: Sequence[str]) -> dict[str, object]:
    record: dict[str, object] = {
        "method": one.way.method,
        "settings": one.way.settings,
        "sync_every": one.every,
        "utilisation": one.utilisation,
        "reaches": one.reaches,
        "wait_seconds_per_round": one.waits,
        "about": one.about,
        "bytes_sent_per_worker_per_step": one.bytes_a_step,
        "bandwidth_mbps": {
            percent: _finite(factor * slowest / 1e6) for percent, factor in zip(percents, one.wanted, strict=True)
        },
        "memory_bytes": one.memory.peak,
        "memory": {
            "weights": one.memory.weights,
            "gradients": one.memory.gradients,
            "inner": one.memory.inner,
            "held": [held._asdict() for held in one.memory.held],
        },
    }
    if job.device_bytes:
        record |= {"device_bytes": one.memory.computing, "fits": one.memory.computing <= job.device_bytes}
    if one.hours is not None:
        record |= {"hours": one.hours, "bytes_sent_per_worker": _total(job, one)}
    return record


def on_device(job: Job, nbytes: float) -> str:
    """Gigabytes, marked where the GPU has fewer."""
    assert job.device_bytes is not None
    more = nbytes > job.device_bytes
    return f"{_short(nbytes / 1e9)} > {_short(job.device_bytes / 1e9)}" if more else _short(nbytes / 1e9)


def device_notes(job: Job, needed: Sequence[float]) -> list[str]:
    """What of the plans does not fit, and what would."""
    if job.device_bytes is None:
        return []
    has = f"{_short(job.device_bytes / 1e9)} GB"
    if max(needed) <= job.device_bytes:
        return [f"GPU GB: weights, gradients, AdamW; the rest is on the host. All fit into {has}, activations aside."]
    return [
        f"Marked with >: weights, gradients and AdamW alone do not fit into the GPU's {has}. More --stages, a plan of "
        "memory (isles memory plan) or a smaller model would."
    ]


def _replayed(job: Job, plans: Sequence[Plan]) -> str:
    """What the waiting is of, and how it was found."""
    about = list(dict.fromkeys(one.way.method for one in plans if one.about))
    run = "in the long run" if job.steps is None else f"of the run's {job.steps} steps, its end included"
    if len(about) == len({one.way.method for one in plans}):
        return "Waiting is about, exchange by exchange in the long run: there are too many messages to replay."
    exact = f"Waiting is {run}, replayed message by message, with the network's jitter."
    return f"{exact} Only about, for there are too many messages: {', '.join(about)}." if about else exact


def _total(job: Job, one: Plan) -> float:
    assert job.tokens is not None and job.step_tokens is not None
    return one.bytes_a_step * job.tokens / job.step_tokens


def _reason(plans: Sequence[Plan], slowest: float, percent: str) -> str:
    first = plans[0]
    share = format_percent(first.utilisation)
    if not first.reaches:
        return (
            f"Nothing reaches {percent} % on these links; {_named(first)} computes most, {share} of the time. A larger "
            "--sync-every, fewer parameters or longer steps (larger batches) would help."
        )
    reason = f"First is {_named(first)}: it computes {share} of the time, and {first.way.why}."
    missed = next((one for one in plans if one.way.kind < first.way.kind and not one.reaches), None)
    if missed is None:
        return reason
    need = "no rate is enough, for the latency alone costs more"
    if not math.isnan(missed.wanted[0]):
        need = f"{percent} % wants {_short(missed.wanted[0] * slowest / 1e6)} Mbit/s"
    share = format_percent(missed.utilisation)
    return f"{reason} {_named(missed)}, which is nearer to one large batch, computes {share}: {need}."


def _named(one: Plan) -> str:
    settings = f" ({one.way.settings})" if one.way.settings else ""
    return f"{one.way.method}{settings}" + (f" with H = {one.every}" if one.way.kind else "")


def _panel(job: Job, plans: Sequence[Plan], slowest: float) -> Panel:
    """One line a method, in its form that ranks highest."""
    best: dict[str, Plan] = {}
    for one in plans:
        best.setdefault(one.way.method, one)
    factors = np.logspace(-2, 3, 81).tolist()
    lines, keys, dots = [], [], []
    for css, one in zip(SERIES, best.values(), strict=False):
        points = [
            (factor * slowest / 1e6, share) for factor, share in zip(factors, curve(job, one, factors), strict=True)
        ]
        lines.append(Polyline(points=points, css=css, name=_named(one)))
        keys.append((css, " ".join(word for word in (one.way.method, _codec(one), f"H = {one.every}") if word)))
        dots.append((slowest / 1e6, one.utilisation))
    left_out = list(best)[len(SERIES) :]
    notes = ["Each at its H.", *([f"Without {', '.join(left_out)}, last in the table."] if left_out else [])]
    chart = Chart(
        title="Share of the time spent computing",
        x_label="Mbit/s of the slowest worker, the others in proportion",
        x_format=plain,
        y_format=lambda share: f"{100 * share:.0f} %",
        lines=lines,
        dots=dots,
        log_x=True,
    )
    return Panel(heading=chart.title, picture=chart, keys=[*keys, ("dot", "as it is")], notes=notes)


def _codec(one: Plan) -> str:
    return "" if one.way.codec == "none" else one.way.codec


def _short(value: float) -> str:
    """Three digits or all before the point; a dash for what is no finite number."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
