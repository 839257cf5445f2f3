"""The sheets of `isles plan methods`, which method for which link, and of `isles plan splits`, every split of the
workers into replicas, stages and workers inside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from isles.network.churn import Poisson
from isles.plan.methods import MethodPlan, MethodTable, inside_share
from isles.plan.question import PlanQuestion
from isles.plan.splits import SplitPlan, SplitsQuestion
from isles.plan.worker_classes import ChurnCosts, churn_costs
from isles.report.draw.style import SERIES
from isles.report.panels import Chart, Panel, Polyline, Table, plain
from isles.report.sheet import Sheet
from isles.report.units import format_bytes, format_percent, format_short


def with_churn(sheet: Sheet, job: PlanQuestion, plans: Sequence[MethodPlan], churn: Poisson) -> Sheet:
    """`sheet`, made of `plans`, with what `churn` costs those that go on without lost workers."""
    found = {id(one): _costs(job, one, churn) for one in plans if one.grows}
    named: dict[str, ChurnCosts] = {}
    for one in plans:
        if id(one) in found:
            named.setdefault(
                f"{one.candidate.method}, {one.candidate.settings or 'as it is'}, H = {one.every}", found[id(one)]
            )
    rows = sheet.data["rows"]
    assert isinstance(rows, list)
    records = [
        {**row, "churn": asdict(found[id(one)])} if id(one) in found else row
        for row, one in zip(rows, plans, strict=True)
    ]
    share = format_percent(churn.per_second * 3600)
    head = f"Workers come and go, {share} of them an hour (of methods that go on without the lost ones):"
    return replace(
        sheet,
        data={**sheet.data, "rows": records},
        notes=[head, *(f"{name}: {_text(costs)}" for name, costs in named.items()), *sheet.notes],
    )


def _costs(job: PlanQuestion, one: MethodPlan, churn: Poisson) -> ChurnCosts:
    return churn_costs(
        churn,
        workers=job.workers,
        parameters=job.parameters,
        computing=one.every * job.step_seconds,
        waits=one.waits,
        bytes_a_round=one.bytes_a_step * one.every,
        pairs=one.pairs,
        rounds=None if job.steps is None else max(job.steps // one.every, 1),
    )


def _text(costs: ChurnCosts) -> str:
    return (
        f"{format_percent(costs.alone)} of the rounds alone, {format_percent(costs.lost)} of the work lost, "
        f"joiners wait {format_percent(costs.waiting)} of the workers' time, Goodput {format_percent(costs.goodput)}; "
        f"{format_bytes(costs.state_bytes)} of states an hour to joiners; where the lighthouse relays, "
        f"{costs.relayed / 1e6:.3g} Mbit/s through it"
    )


_SEARCHED = (
    "Rates wanted, and the curves, are searched with alike workers played once: about, of the long run. Left "
    "out: the time to encode, and differences in the workers' speed. Memory: AdamW in float32 and what the method "
    "keeps, at its fullest, as --dry-run counts it."
)


def plan_sheet(job: PlanQuestion, table: MethodTable, network: str, *, target: float, pictures: bool) -> Sheet:
    """`table` as it was made for `target`. network: its name in words. pictures: whether they are wanted."""
    plans, shape = table.plans, job.model.shape()
    slowest = job.links.slowest_rate(job.workers)
    pace = f"{_short(slowest / 1e6)} Mbit/s" if math.isfinite(slowest) else "no limit on its rate"
    percent, prices = f"{100 * target:g}", (job.price_gb, job.price_hour) != (None, None)
    workers = f"{job.workers} workers" if job.devices == 1 else f"{job.sites} sites of {job.devices} devices"
    reached = "computing" if job.devices == 1 else "of what a site alone computes"
    heads = ["", "method", "settings", *(["inside"] if job.devices > 1 else []), "H", "computing %", "waits s/round"]
    heads += ["sent MB/step", f"Mbit/s for {percent} %", "memory GB", *(["GPU GB"] if job.machine else [])]
    heads += ["hours", "sent GB", *(["money"] if prices else [])] if job.tokens else []
    return Sheet(
        name="plan",
        title=f"{format_short(job.parameters)} parameters, {workers}, {network}",
        subtitle=f"{job.step_seconds:.4g} s of computing a step; the slowest worker has {pace}",
        what=f"First what reaches {percent} % {reached}: nearest to data parallel first, then the smaller H.",
        table=Table(heads=heads, rows=[_row(job, one, slowest) for one in plans], names=3),
        data={
            "network": network,
            "slowest_mbps": _finite(slowest / 1e6),
            "rows": [_record(job, one, slowest, percent) for one in plans],
        },
        panels=[_panel(plans, slowest)] if pictures and math.isfinite(slowest) else [],
        notes=[
            _reason(plans, slowest, percent),
            _replayed(job, plans),
            _SEARCHED,
            "* nothing else is better in something and worse in nothing: fit, change of training, time, bytes, money.",
            *_inside_notes(job, plans[0]),
            *_fit_notes(job, plans),
            f"The model: a decoder of {shape.layers} layers, {shape.d_model} wide, MLP {shape.ffn}, {shape.vocab} ids.",
            *_enough(plans, percent),
            *(f"Not planned: {name}: {why}" for name, why in table.left_out.items()),
        ],
    )


def _enough(plans: Sequence[MethodPlan], percent: str) -> list[str]:
    """The rounds that would do for those that do not reach the share."""
    found = {
        f"{one.candidate.method} {one.candidate.settings}".strip(): one.timing.enough
        for one in plans
        if one.timing.enough
    }
    if not found:
        return []
    return [f"For {percent} % at these rates: {'; '.join(f'{name} wants H = {H:,}' for name, H in found.items())}."]


def _row(job: PlanQuestion, one: MethodPlan, slowest: float) -> list[str]:
    cells = ["*" if one.is_best else "", one.candidate.method, one.candidate.settings]
    cells += [one.question.inside] if job.devices > 1 else []
    cells += [str(one.every), f"{100 * one.utilisation:.1f}", _short(one.waits), _short(one.bytes_a_step / 1e6)]
    cells += [*(_short(factor * slowest / 1e6) for factor in one.timing.wanted), _short(one.memory.peak / 1e9)]
    cells += [on_device(job, one.fit.device_bytes)] if one.fit else []
    if one.hours is not None and one.nbytes is not None:
        cells += [_short(one.hours), _short(one.nbytes / 1e9), *([] if one.money is None else [_short(one.money)])]
    return cells


def _record(job: PlanQuestion, one: MethodPlan, slowest: float, percent: str) -> dict[str, object]:
    memory = one.memory
    record: dict[str, object] = {
        "method": one.candidate.method,
        "settings": one.candidate.settings,
        "best": one.is_best,
        "sync_every": one.every,
        "utilisation": one.utilisation,
        "reaches": one.timing.reaches,
        "wait_seconds_per_round": one.waits,
        "about": one.timing.about,
        "sync_every_wanted": one.timing.enough,
        "bytes_sent_per_worker_per_step": one.bytes_a_step,
        "bandwidth_mbps": {percent: _finite(one.timing.wanted[0] * slowest / 1e6)},
        "memory_bytes": memory.peak,
        "memory": {
            "weights": memory.weights,
            "gradients": memory.gradients,
            "inner": memory.inner,
            "held": [held._asdict() for held in memory.held],
        },
    }
    record |= {"inside": one.question.inside} if job.devices > 1 else {}
    if one.fit:
        fit = one.fit
        record |= {"device_bytes": fit.device_bytes, "activations": fit.activations, "fits": fit.fits}
        record |= {"host_bytes": fit.host_bytes, "suggestions": fit.suggestions}
    if one.hours is not None:
        record |= {"hours": one.hours, "bytes_sent": one.nbytes, "money": one.money}
    return record


def on_device(job: PlanQuestion, nbytes: float) -> str:
    """Gigabytes, marked where the GPU has fewer."""
    assert job.machine is not None
    more = nbytes > job.machine.device_bytes
    return f"{_short(nbytes / 1e9)} > {_short(job.machine.device_bytes / 1e9)}" if more else _short(nbytes / 1e9)


def _inside_notes(job: PlanQuestion, first: MethodPlan) -> list[str]:
    """What the devices of a site wait for each other."""
    if job.devices == 1:
        return []
    share = format_percent(inside_share(first.question))
    return [f"Inside a site, over {job.near}, devices by {first.question.inside} compute {share} of the time."]


def _fit_notes(job: PlanQuestion, plans: Sequence[MethodPlan]) -> list[str]:
    """What does not fit into memory, and what would make it fit."""
    if job.machine is None:
        return []
    unfit = [one for one in plans if one.is_unfit]
    batches = sorted({one.question.batches for one in plans if one.question.stages == 1})
    parts = sorted({one.config.pipeline.microbatches for one in plans if one.question.stages > 1})
    about = "GPU GB: weights, gradients, AdamW and activations; what a method keeps is on the host"
    about += f"; stages take {' or '.join(map(str, parts))} microbatches a step" if parts else ""
    if batches and batches[-1] > 1:
        about += f"; gradients of {' or '.join(map(str, batches))} batches a step are accumulated"
    if not unfit:
        return [f"{about}. All fit into {job.machine.name}."]
    suggestions: dict[tuple[str, ...], list[str]] = {}
    for one in unfit:
        assert one.fit is not None
        suggestions.setdefault(one.fit.suggestions, []).append(
            " ".join((one.candidate.method, one.candidate.settings)).strip()
        )
    return [f"{about}. What does not fit into {job.machine.name} is last."] + [
        f"Each alone makes it fit: {'; '.join(each)} ({', '.join(names)})."
        if each
        else f"Nothing that is known here makes it fit: {', '.join(names)}. A smaller model or more stages would."
        for each, names in suggestions.items()
    ]


def _replayed(job: PlanQuestion, plans: Sequence[MethodPlan]) -> str:
    """What the waiting is of, and how it was found."""
    about = list(dict.fromkeys(one.candidate.method for one in plans if one.timing.about))
    run = "in the long run" if job.steps is None else f"of the run's {job.steps} steps, its end included"
    if about and {one.candidate.method for one in plans if one.waits} <= set(about):
        return (
            f"Waiting is about, {run}: alike workers are played once, a latency that varies is taken as long as usual."
        )
    exact = f"Waiting is {run}, replayed message by message, with the network's jitter."
    return f"{exact} Only about, for there are too many messages: {', '.join(about)}." if about else exact


def _reason(plans: Sequence[MethodPlan], slowest: float, percent: str) -> str:
    first = plans[0]
    share = format_percent(first.utilisation)
    if first.fit and first.is_unfit:
        return f"Nothing fits into {first.fit.machine}; if it did, {_named(first)} would compute {share} of the time."
    if not first.timing.reaches:
        return (
            f"Nothing reaches {percent} % on these links; {_named(first)} computes most, {share} of the time. A larger "
            "H, fewer parameters or longer steps (larger batches) would help."
        )
    reason = f"First is {_named(first)}: it computes {share} of the time, and {first.candidate.why}."
    missed = next((one for one in plans if one.candidate.kind < first.candidate.kind and not one.timing.reaches), None)
    if missed is None:
        return reason
    need = "no rate is enough, for the latency alone costs more"
    if not math.isnan(missed.timing.wanted[0]):
        need = f"{percent} % wants {_short(missed.timing.wanted[0] * slowest / 1e6)} Mbit/s"
    share = format_percent(missed.utilisation)
    return f"{reason} {_named(missed)}, which is nearer to one large batch, computes {share}: {need}."


def _named(one: MethodPlan) -> str:
    settings = f" ({one.candidate.settings})" if one.candidate.settings else ""
    return f"{one.candidate.method}{settings}" + (f" with H = {one.every}" if one.candidate.kind else "")


def _panel(plans: Sequence[MethodPlan], slowest: float) -> Panel:
    """One line a method, in its form that ranks highest."""
    best: dict[str, MethodPlan] = {}
    for one in plans:
        best.setdefault(one.candidate.method, one)
    factors = np.logspace(-2, 3, 61).tolist()
    lines, keys, dots = [], [], []
    for css, one in zip(SERIES, best.values(), strict=False):
        points = [(factor * slowest / 1e6, one.timing.curve(factor)) for factor in factors]
        lines.append(Polyline(points=points, css=css, name=_named(one)))
        codec = str(one.candidate.replicas.get("codec", ""))
        keys.append((css, " ".join(part for part in (one.candidate.method, codec, f"H = {one.every}") if part)))
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


def _short(value: float) -> str:
    """Three digits or all before the point; a dash for what is no finite number."""
    if not math.isfinite(value):
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def splits_sheet(splits: SplitsQuestion, plans: Sequence[SplitPlan], network: str) -> Sheet:
    """`plans`, the best first. network: its name in words."""
    job, first = splits.question, plans[0]
    hours = "" if job.steps is None else f", {job.steps * first.step / 3600:,.0f} hours in all"
    heads = ["replicas x stages x inside", "step s", "computing %", "bubble %", "waits s/step"]
    heads += ["MB/step to stages", "MB/step to replicas", "memory GB"]
    heads += ["GPU GB"] if job.machine else []
    return Sheet(
        name="plan-stages",
        title=f"{format_short(job.parameters)} parameters, {job.workers} workers, {network}",
        subtitle=f"As {_split_name(first)} {first.step:.4g} s a step, {first.computing:.4g} s of it computing{hours}",
        what=f"Replicas by {splits.method}, H = {splits.every}; {splits.microbatches} microbatches, "
        f"{splits.routing} routing; between stages {format_boundary(splits.boundary)}.",
        table=Table(heads=heads, rows=[_split_row(job, one) for one in plans]),
        data={"network": network, "rows": [_split_record(job, one) for one in plans]},
        panels=[],
        notes=[
            f"First is {_split_name(first)}: it computes {format_percent(first.computing / first.step)} of the time.",
            "Each is replayed in the long run: tasks of the stages and exchanges, message by message, over the same "
            "links. All take the same text a step of all workers.",
            "Bubble: waiting for other stages. Waits: for other replicas, and inside a stage. Memory: of the fullest "
            "worker, AdamW in float32 and the method's vectors, without activations.",
            *device_notes(job, plans),
        ],
    )


def device_notes(job: PlanQuestion, plans: Sequence[SplitPlan]) -> list[str]:
    """What does not fit, and what would."""
    if job.machine is None:
        return []
    about = "GPU GB: weights, gradients, AdamW and activations; the rest is on the host"
    about += (
        "; recompute: a stage runs forward passes again, a third more work"
        if any(one.recompute for one in plans)
        else ""
    )
    if all(one.fits for one in plans):
        return [f"{about}. All fit into {job.machine.name}."]
    return [
        f"{about}. What does not fit into {job.machine.name} is last: more stages, smaller microbatches, a plan of "
        "memory (isles plan memory) or a smaller model would."
    ]


def format_boundary(keys: Mapping[str, Any]) -> str:
    """What crosses between stages. keys: of [pipeline.boundary]."""
    name, codec, update_every = keys.get("kind", "none"), keys.get("codec", "none"), keys.get("update_every", 0)
    what = "the whole stream" if name == "none" else name
    return (
        what
        + ("" if codec == "none" else f" in {codec}")
        + (f", turned every {update_every} steps" if update_every else "")
    )


def _split_row(job: PlanQuestion, one: SplitPlan) -> list[str]:
    shares = [f"{100 * part / one.step:.1f}" for part in (one.computing, one.bubble)]
    sent = [_short(nbytes / 1e6) for nbytes in (one.stage_bytes, one.outer_bytes)]
    memory = [_short(one.memory / 1e9), *([on_device(job, one.on_device)] if job.machine else [])]
    return [_split_name(one), _short(one.step), *shares, _short(one.waiting), *sent, *memory]


def _split_record(job: PlanQuestion, one: SplitPlan) -> dict[str, object]:
    split = one.split
    fits = {"device_bytes": one.on_device, "fits": one.fits, "recompute": one.recompute} if job.machine else {}
    return {
        "replicas": split.replicas,
        "stages": split.stages,
        "inner": split.inner,
        "step_seconds": one.step,
        "utilisation": one.computing / one.step,
        "bubble": one.bubble / one.step,
        "wait_seconds_per_step": one.waiting,
        "bytes_to_stages_per_worker_per_step": one.stage_bytes,
        "bytes_to_replicas_per_worker_per_step": one.outer_bytes,
        "memory_bytes": one.memory,
        **fits,
    }


def _split_name(one: SplitPlan) -> str:
    again = ", recompute" if one.recompute else ""
    return f"{one.split.replicas} x {one.split.stages} x {one.split.inner}{again}"
