"""The sheet of `isles plan --stages ...`: every split of the workers into replicas, stages and workers inside."""

from __future__ import annotations

from collections.abc import Sequence

from isles.pipeline.planning import SplitPlan, StagesJob
from isles.report.panels import Table
from isles.report.sheet import Sheet
from isles.report.units import format_percent, format_short


def splits_sheet(asked: StagesJob, plans: Sequence[SplitPlan], network: str) -> Sheet:
    """`plans`, the best first. network: its name in words."""
    job, first = asked.job, plans[0]
    heads = ["replicas x stages x inside", "step s", "computing %", "bubble %", "waits s/step"]
    heads += ["MB/step to stages", "MB/step to replicas", "memory GB"]
    return Sheet(
        name="plan-stages",
        title=f"{format_short(job.parameters)} parameters, {job.workers} workers, {network}",
        subtitle=f"{first.computing:.4g} s of computing a step in every split, {first.step:.4g} s as {_named(first)}",
        what=f"Replicas by {asked.method}, H = {asked.every}; {asked.microbatches} microbatches, {asked.routing} ways; "
        f"between stages {asked.boundary}.",
        table=Table(heads=heads, rows=[_row(one) for one in plans]),
        data={"network": network, "rows": [_record(one) for one in plans]},
        panels=[],
        notes=[
            f"First is {_named(first)}: it computes {format_percent(first.computing / first.step)} of the time.",
            "Each is replayed in the long run: tasks of the stages and exchanges, message by message, over the same "
            "lines. All take the same text a step of all workers.",
            "Bubble: waiting for other stages. Waits: for other replicas, and inside a stage. Memory: of the fullest "
            "worker, AdamW in float32 and the method's vectors, without activations.",
        ],
    )


def _row(one: SplitPlan) -> list[str]:
    shares = [f"{100 * part / one.step:.1f}" for part in (one.computing, one.bubble)]
    sent = [_short(nbytes / 1e6) for nbytes in (one.stage_bytes, one.outer_bytes)]
    return [_named(one), _short(one.step), *shares, _short(one.waiting), *sent, _short(one.memory / 1e9)]


def _record(one: SplitPlan) -> dict[str, object]:
    split = one.split
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
    }


def _named(one: SplitPlan) -> str:
    return f"{one.split.replicas} x {one.split.stages} x {one.split.inner}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
