"""The sheet of `isles plan splits`: every split of the workers into replicas, stages and workers inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from isles.plan.question import PlanQuestion
from isles.plan.splits import SplitPlan, SplitsQuestion
from isles.report.panels import Table
from isles.report.sheet import Sheet
from isles.report.sheets.methods import on_device
from isles.report.units import format_percent, format_short


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
