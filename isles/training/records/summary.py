"""The summary of a run, from its workers' results. Loads no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from isles.base import schema
from isles.base.version import __version__
from isles.training.config.sections import Config

SummaryTable = dict[str, Any]
_MEAN_HEADER = 32  # bytes beside a mean


def by_channel(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Means over the workers of their counters."""
    sums: dict[str, dict[str, float]] = {}
    for result in results:
        for name, counts in result["channels"].items():
            own = sums.setdefault(name, dict.fromkeys(counts, 0.0))
            for key, value in counts.items():
                own[key] += value
    return {name: {key: total / len(results) for key, total in counts.items()} for name, counts in sums.items()}


def summarise(of: Config, results: list[dict[str, Any]], wall_seconds: float) -> SummaryTable:
    """The contents of summary.json from what the workers returned."""

    def mean(key: str) -> float:
        return sum(result[key] for result in results) / len(results)

    compute, blocked = mean("compute_seconds"), mean("blocked_seconds")
    validated = [result["val_loss_replica"] for result in results if result["val_loss_replica"] is not None]
    channels = by_channel(results)
    waited = channels.get("pipeline", {}).get("blocked_seconds", 0.0)
    bubble = waited / (compute + blocked) if compute + blocked else 0.0
    first, world = max(results, key=lambda result: result["parameters"]), of.world  # who put the model together
    made = schema.Summary(
        isles_version=__version__,
        method=of.method,
        backend=world.backend,
        workers=len(results),
        stages=of.pipeline.stages if of.pipeline.stages > 1 else None,
        pipeline_bubble=bubble if of.pipeline.stages > 1 else None,
        replicas=of.replicas_in_all if of.replicas_in_all < world.workers else None,
        islands=of.replicas_in_all if world.inner > 1 else None,
        bytes_across_per_worker=channels.get("outer", {}).get("bytes_sent", 0.0) if world.inner > 1 else None,
        steps=of.run.steps,
        tokens=sum(result["tokens"] for result in results),
        parameters=first["parameters"],
        val_loss=first["val_loss"],
        val_loss_replicas=sum(validated) / len(validated) if validated else None,
        replica_std=first["replica_std"],
        bytes_sent_per_worker=mean("bytes_sent"),
        bytes_received_per_worker=mean("bytes_received"),
        channels=channels,
        ddp_bytes_per_worker=first["ddp_bytes"],
        compute_seconds=compute,
        blocked_seconds=blocked,
        compute_utilisation=compute / (compute + blocked) if compute + blocked else 1.0,
        train_seconds=max(result["train_seconds"] for result in results),
        wall_seconds=wall_seconds,
        virtual_seconds=max(result["virtual_seconds"] for result in results) if world.is_simulated else None,
        seed=of.run.seed,
        corpus_sha256=first["corpus_sha256"],
        memory=first["memory"],
    )
    return made.record() | {key: loss for key, loss in first.items() if key.startswith("val_loss.")}


def of_everybody(
    results: Mapping[int, Mapping[str, Any]], taken: Collection[int], metrics: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The results of all members that a run has had, those of `taken`, which the model is made of, in front. A member
    that was lost, or has left, has the counters of its last line of `metrics`, by channel as the others on average.
    """
    last = {line["worker"]: line for line in metrics if "bytes_sent" in line}
    every = [dict(results[member]) for member in sorted(results, key=lambda member: member not in taken)]
    for one in every[len(taken) :]:
        one["val_loss_replica"] = None
    channels = by_channel(every)
    for line in (line for member, line in last.items() if member not in results):
        own = {key: line[key] for key in ("bytes_sent", "bytes_received", "blocked_seconds")}
        share = {key: own[key] / (sum(one[key] for one in channels.values()) or 1.0) for key in own}
        of = {name: {key: one[key] * share[key] for key in one} for name, one in channels.items()}
        own |= {"channels": of, "compute_seconds": line["compute_seconds"], "virtual_seconds": line["clock_seconds"]}
        every.append({**own, "tokens": 0, "parameters": 0, "train_seconds": 0.0, "val_loss_replica": None})
    return every


def parallel_bytes(parameters: int, workers: int, steps: int) -> float:
    """Bytes that each sends, on average, where gradients are averaged as they are, in one piece a step: to the bit."""
    return steps * (2 * (workers - 1) * 4 * parameters + workers * (workers - 1) * _MEAN_HEADER) / workers
