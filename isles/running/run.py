"""From a configuration to a run directory: start the workers, write their metrics live, and write the summary.

RUN/config.toml        resolved          with the first line of metrics
RUN/metrics.jsonl      one object per line  live, by this process only; lines without a worker are about all of them
RUN/timeline.jsonl     a span per line   the beginning of the run and its end, see `timeline`
RUN/checkpoints/       see `checkpoint`  shards by the workers, committed here
RUN/model.safetensors  consolidated      by worker 0 at the end
RUN/summary.json                         at the end: its presence means the run is complete
RUN/logs/worker-N.log  prints, tracebacks and warnings of that worker's process, if there were any
RUN/tensorboard/, RUN/wandb/             if `run.loggers` names them, see `loggers`
RUN/run.lock                             while the run is in progress, see `rundir`

A run that ends before its first line of metrics leaves only logs, so that the same --out can be used again. With
several machines this is node 0; the others run `follow`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from isles.base.durable import write_text
from isles.comm.errors import WorkerFailed
from isles.launch.nodes import SINGLE_NODE, NodeGroup, NodeSpec
from isles.launch.workers import raise_first
from isles.plan.run_plan import priced
from isles.running.agree import meet_nodes
from isles.training.config.conflicts import refuse_conflicts
from isles.training.config.sections import Config
from isles.training.config.trust import settled
from isles.training.interrupts import GraceOver, first_interrupt, notify_in_handler, time_limit
from isles.training.memory.plans import prepared, refusals
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.loggers import Loggers, require
from isles.training.records.rundir import SUMMARY, as_json, run_directory
from isles.training.records.summary import SummaryTable, summarise
from isles.training.records.tokens import forget
from isles.training.records.writer import Records
from isles.training.stage_runner import refuse_stages

STARTERS: dict[str, str] = {
    "distributed": "isles.running.backends",
    "virtual": "isles.running.virtual",
}


class Started(Protocol):
    """Running workers, such as `isles.launch.workers.Workers`."""

    @property
    def failures(self) -> Sequence[int]:
        """Ranks in the order in which they failed."""

    def stop(self) -> None:
        """Ask all to stop after a common inner step (`Mesh.stop_here`). Safe in a signal handler."""

    def join(
        self,
        on_event: Callable[[Any], None] | None = None,
        on_failure: Callable[[int, Exception], None] | None = None,
    ) -> list[Any]:
        """All results in rank order; a failed worker's is its exception. Arguments as in `Workers.join`."""


StartTraining = Callable[[Config, Path, int | None, NodeGroup], Started]
"""(config, run directory, step to resume from, the machines) -> running workers."""


def starter(backend: str) -> Any:
    """The module of a backend. It has `train`, a `StartTraining`, and `call(worker, workers, config, args, out)`, which
    starts `worker(world, *args)` on `workers` workers with logs below `out`.
    """
    return import_module(STARTERS[backend])


def launch(
    config: Config,
    out: Path,
    on_metrics: Callable[[dict[str, Any]], None],
    on_notice: Callable[[str], None],
    resume: int | None = None,
    node_spec: NodeSpec = SINGLE_NODE,
    start_workers: StartTraining | None = None,
) -> SummaryTable:
    """Run `config` into the directory `out`, which is created if it is missing.

    Args:
        on_metrics: called with each line of metrics.jsonl.
        on_notice: called with notices for the user.
        resume: resume exactly from the checkpoint of that step in `out`; with several machines, from the newest one
            that all of them have.
        node_spec: of this machine, which is node 0.
        start_workers: starts the workers; None: those of the backend that [world] names.

    Raises:
        ValueError: `out` holds a run already, is in use by one, or cannot be created; a logger's package is missing.
        OSError: the disk is full.
        Interrupted: Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 or the end of run.max_hours; the workers agreed on a step and
            wrote a checkpoint, or could not within run.grace. A second Ctrl-C or SIGTERM ends them at once.

    A worker's error is raised unchanged; files written until then stay, if there was a line of metrics.
    """
    refusals(config)
    refuse_stages(config)
    refuse_conflicts(config, "fixed workers")
    if config.memory.method != "none":
        for stage in range(config.pipeline.stages):
            prepared(config, stage)  # ValueError for an impossible plan, before any file is written
    price = priced(config, config.run.priced_as) if config.run.priced_as else {}
    require(config.run.loggers)
    started = time.perf_counter()
    start = start_workers or starter(config.world.backend).train
    with (
        run_directory(out, resume, node_spec) as lock,
        meet_nodes(config, node_spec, out, resume, on_notice) as node_group,
        settled(config, out) as config,
    ):
        resume = node_group.facts.get("resume", resume)
        with (
            Loggers(config, out, resume) as loggers,
            Records(config, out, on_metrics, on_notice, node_group, loggers, resume, lock) as records,
        ):
            if resume is not None:
                Checkpoints(out).go_back(resume)
            try:
                results = _joined(start(config, out, resume, node_group), config, records.take)
            except GraceOver as late:
                raise Interrupted(out, node_spec, late.seconds) from None
            finished = [result for result in results if result is not None]
            if len(finished) < len(results):
                raise Interrupted(out, node_spec)
            summary = summarise(config, finished, time.perf_counter() - started) | price
            # Last of the files: its presence means that the run is complete.
            write_text(out / SUMMARY, as_json(summary, indent=2) + "\n")
            loggers.summary(summary)
            forget(out)
    return summary


class Interrupted(KeyboardInterrupt):
    """The run was stopped. step: of the newest checkpoint in `out`; None: there is none.

    late: seconds within which the workers did not agree on a common step; None if they did.
    """

    def __init__(self, out: Path, node_spec: NodeSpec, late: float | None = None) -> None:
        self.out, self.step, self.late = out, max(Checkpoints(out).steps(), default=None), late
        again = f"go on with: isles resume {out}{node_spec.flags}"
        if late is not None:
            saved = f"the last checkpoint is of step {self.step}; {again}" if self.step else "there is no checkpoint"
            super().__init__(f"stopped; not all had saved within {late:g} s (run.grace); {saved}")
        elif self.step is None:
            super().__init__("stopped; there is no checkpoint, as a worker was lost while the first was written")
        else:
            super().__init__(f"stopped after step {self.step}, checkpoint saved; {again}")


def _joined(pool: Started, config: Config, on_event: Callable[[Any], None]) -> list[dict[str, Any] | None]:
    """The workers' results; None for those that stopped. Without workers that have left, or were lost if the method
    goes on without them.
    """
    left_ranks = set[int]()

    def take(event: Any) -> None:
        if "left" in event:
            left_ranks.add(event["left"])
        on_event(event)

    def notify(rank: int, error: Exception) -> None:
        why = (error.report if isinstance(error, WorkerFailed) else str(error)).splitlines()[-1]
        on_event({"lost": rank, "notice": f"worker {rank} failed ({why}); the others go on without it"})

    def stop() -> None:
        pool.stop()
        notify_in_handler("stopping: all workers end the current step and save; Ctrl-C again ends them at once")

    with time_limit(config.run.max_hours, stop), first_interrupt(stop, config.run.grace):
        results = pool.join(take, notify if config.survives else None)
    left = [result for rank, result in enumerate(results) if rank not in left_ranks.union(pool.failures)]
    if not (config.survives and left):
        raise_first(results, pool.failures)
    return left
