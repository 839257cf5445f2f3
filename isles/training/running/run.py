"""From a configuration to a run directory: start the workers, write their metrics live, put the summary together.

RUN/config.toml        resolved          with the first line of metrics
RUN/metrics.jsonl      one object a line live, by this process alone; the lines without a worker are about all of them
RUN/timeline.jsonl     one span a line   the beginning of the run and its end, see `timeline`
RUN/checkpoints/       see `checkpoint`  shards by the workers, committed here
RUN/model.safetensors  consolidated      by worker 0 at the end
RUN/summary.json                         at the end: its presence means the run is complete
RUN/logs/worker-N.log  prints, tracebacks and warnings of that worker's process, if there were any
RUN/tensorboard/, RUN/wandb/             where `run.loggers` asks for them, see `loggers`
RUN/run.lock                             while the run goes on, see `lock`

A run that ends before its first line of metrics leaves nothing behind but logs that say why, so that the same --out can
be used again. With several machines this is what node 0 does; the others: `follow`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isles import schema
from isles.comm.errors import WorkerFailed
from isles.durable import write_text
from isles.launch.nodes import SINGLE_NODE, NodeSpec
from isles.launch.workers import raise_first
from isles.training.config.kept import settled
from isles.training.config.sections import Config
from isles.training.memory import prepared, refusals
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.loggers import Loggers, require
from isles.training.records.rundir import SUMMARY, run_directory
from isles.training.records.tokens import forget
from isles.training.records.writer import Records, as_json
from isles.training.running.agree import met
from isles.training.running.backends import Started, StartTraining, starter
from isles.training.running.starting import GraceOver, first_interrupt
from isles.training.staged import refuse_stages
from isles.version import __version__

SummaryTable = dict[str, Any]


def launch(
    config: Config,
    out: Path,
    on_line: Callable[[dict[str, Any]], None],
    on_notice: Callable[[str], None],
    resume: int | None = None,
    node_spec: NodeSpec = SINGLE_NODE,
    start_workers: StartTraining | None = None,
) -> SummaryTable:
    """Run `config` into the directory `out`, which is made where it is missing.

    on_line: sees each line of metrics.jsonl as it comes. on_notice: is told what a user should know about the settings.
    resume: go on from the checkpoint of that step in `out`, as if the run had never stopped; with several machines from
    the newest that all of them have. node_spec: this machine's among several; it is node 0.
    start_workers: gets hold of the workers; by default those of the backend that [world] names.

    ValueError: `out` holds a run already, is in use by one, or cannot be made; a logger's package is absent. OSError:
    the disk filled up. A worker's failure is raised as it is; what was written until then stays, if the run had got as
    far as its first metrics. Interrupted: Ctrl-C, SIGTERM or SIGHUP; the workers agreed on a step and left a
    checkpoint, or could not within run.grace. A second one ends them at once.
    """
    refusals(config)
    refuse_stages(config)
    for key in ("lease", "join_state", "max_members"):
        if (value := getattr(config.world, key)) != getattr(type(config.world), key):
            raise ValueError(f"world.{key} = {value}: acts where workers join a lighthouse; leave it out")
    if config.memory.method != "none":
        for stage in range(config.pipeline.stages):
            prepared(config, stage)  # refuses what cannot be before anything is made
    require(config.run.loggers)
    started = time.perf_counter()
    start = start_workers or starter(config.world.backend).train
    with (
        run_directory(out, resume, node_spec) as lock,
        met(config, node_spec, out, resume, on_notice) as node_group,
        settled(config, out) as config,
    ):
        resume = node_group.facts.get("resume", resume)
        with (
            Loggers(config, out, resume) as loggers,
            Records(config, out, on_line, on_notice, node_group, loggers, resume, lock) as records,
        ):
            try:
                results = _joined(start(config, out, resume, node_group), config, records.take)
            except GraceOver as late:
                raise Interrupted(out, node_spec, late.seconds) from None
            finished = [result for result in results if result is not None]
            if len(finished) < len(results):
                raise Interrupted(out, node_spec)
            summary = summarise(config, finished, time.perf_counter() - started)
            write_text(out / SUMMARY, as_json(summary, indent=2) + "\n")
            loggers.summary(summary)
            forget(out)
    return summary


class Interrupted(KeyboardInterrupt):
    """The run was stopped after inner step `step`, of the newest checkpoint in `out`; None where there is none.

    late: seconds in which the workers did not come to a common step; None where they did.
    """

    def __init__(self, out: Path, node_spec: NodeSpec, late: float | None = None) -> None:
        self.out, self.step, self.late = out, max(Checkpoints(out).steps(), default=None), late
        again = f"go on with: isles resume {out}{node_spec.flags}"
        if late is not None:
            saved = f"the last checkpoint is of step {self.step}; {again}" if self.step else "there is no checkpoint"
            super().__init__(f"stopped; not all had saved within {late:g} s (run.grace); {saved}")
        elif self.step is None:
            super().__init__("stopped; there is no checkpoint, for a worker was lost while the first was written")
        else:
            super().__init__(f"stopped after step {self.step}, checkpoint saved; {again}")


def _last_line(error: Exception) -> str:
    return (error.report if isinstance(error, WorkerFailed) else str(error)).splitlines()[-1]


def _joined(pool: Started, config: Config, on_event: Callable[[Any], None]) -> list[dict[str, Any] | None]:
    """What the workers return; None for those that stopped. Those that were lost are left out, where the method goes
    on without them.
    """

    def tell(rank: int, error: Exception) -> None:
        on_event({"lost": rank, "notice": f"worker {rank} failed ({_last_line(error)}); the others go on without it"})

    def stop() -> None:
        pool.stop()
        said = "isles: stopping: all workers end the step under way and save; Ctrl-C again ends them at once\n"
        with contextlib.suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), said.encode())  # in a handler: whoever prints may be in the middle of it

    with first_interrupt(stop, config.run.grace):
        results = pool.join(on_event, tell if config.survives else None)
    left = [result for rank, result in enumerate(results) if rank not in pool.failures]
    if not (config.survives and left):
        raise_first(results, pool.failures)
    return left


def by_channel(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Means over the workers of what they counted."""
    sums: dict[str, dict[str, float]] = {}
    for result in results:
        for name, counts in result["channels"].items():
            own = sums.setdefault(name, dict.fromkeys(counts, 0.0))
            for key, value in counts.items():
                own[key] += value
    return {name: {key: total / len(results) for key, total in counts.items()} for name, counts in sums.items()}


def summarise(config: Config, results: list[dict[str, Any]], wall_seconds: float) -> SummaryTable:
    """The contents of summary.json from what the workers returned."""

    def mean(key: str) -> float:
        return sum(result[key] for result in results) / len(results)

    compute, blocked = mean("compute_seconds"), mean("blocked_seconds")
    judged = [result["val_loss_replica"] for result in results if result["val_loss_replica"] is not None]
    channels = by_channel(results)
    waited = channels.get("pipeline", {}).get("blocked_seconds", 0.0)
    bubble = waited / (compute + blocked) if compute + blocked else 0.0
    first, world = max(results, key=lambda result: result["parameters"]), config.world  # who put the model together
    return schema.Summary(
        isles_version=__version__,
        method=config.method,
        backend=world.backend,
        workers=len(results),
        stages=config.pipeline.stages if config.pipeline.stages > 1 else None,
        pipeline_bubble=bubble if config.pipeline.stages > 1 else None,
        replicas=config.replicas_in_all if config.replicas_in_all < world.workers else None,
        islands=config.replicas_in_all if world.inner > 1 else None,
        bytes_across_per_worker=channels.get("outer", {}).get("bytes_sent", 0.0) if world.inner > 1 else None,
        steps=config.run.steps,
        tokens=sum(result["tokens"] for result in results),
        parameters=first["parameters"],
        val_loss=first["val_loss"],
        val_loss_replicas=sum(judged) / len(judged) if judged else None,
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
        seed=config.run.seed,
        corpus_sha256=first["corpus_sha256"],
        memory=first["memory"],
    ).record()
