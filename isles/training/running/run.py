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
be used again. With several machines this is what node 0 does; the others: `remote`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from isles.comm.errors import WorkerFailed
from isles.comm.mesh import Mesh
from isles.comm.stopping import SharedStopControl
from isles.comm.transport import Deadlines
from isles.comm.virtual.run import run_virtual
from isles.data import load_corpus
from isles.launch.nodes import SINGLE_NODE, NodeGroup, NodeSpec
from isles.launch.workers import LocalWorkers, Workers, raise_first
from isles.training.config.sections import Config
from isles.training.memory import prepared, step_seconds
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.loggers import Loggers, require
from isles.training.records.rundir import LOGS, SUMMARY, claim, clear_logs, go_on, has_room, held, say_what_is_left
from isles.training.records.writer import Records, as_json
from isles.training.running.agree import met
from isles.training.running.server import start_server
from isles.training.trainer import train_worker
from isles.version import __version__

_PAUSES = 1000.0  # mean lengths of a pause: chance e^-1000, and room for many pauses in a round

Summary = dict[str, Any]
StartWorkers = Callable[[Config, Path, int | None, NodeGroup], Workers]


def launch(
    config: Config,
    out: Path,
    on_line: Callable[[dict[str, Any]], None],
    on_notice: Callable[[str], None],
    resume: int | None = None,
    node_spec: NodeSpec = SINGLE_NODE,
    start_workers: StartWorkers | None = None,
) -> Summary:
    """Run `config` into the directory `out`, which is made where it is missing.

    on_line: sees each line of metrics.jsonl as it comes. on_notice: is told what a user should know about the settings.
    resume: go on from the checkpoint of that step in `out`, as if the run had never stopped; with several machines from
    the newest that all of them have. node_spec: this machine's among several; it is node 0.
    start_workers: gets hold of the workers; by default they are processes that are started here.

    ValueError: `out` holds a run already, is in use by one, or cannot be made; a logger's package is absent. OSError:
    the disk filled up. A worker's failure is raised as it is; what was written until then stays, if the run had got as
    far as its first metrics. Interrupted: Ctrl-C; the workers agreed on a step and left a checkpoint. A second Ctrl-C
    ends them at once.
    """
    if config.memory.method != "none":
        prepared(config)  # refuses what cannot be before anything is made
    try:
        require(config.run.loggers)
        with held(out):
            return _launch(config, out, on_line, on_notice, resume, node_spec, start_workers or start_processes)
    except BaseException as error:  # Ctrl-C too
        with contextlib.suppress(OSError):  # not empty, or not ours to remove
            out.rmdir()
        if isinstance(error, OSError) and not has_room(error):
            raise OSError(f"{out}: cannot be written to ({error.strerror}); {go_on(out, node_spec)}") from error
        raise


def _launch(
    config: Config,
    out: Path,
    on_line: Callable[[dict[str, Any]], None],
    on_notice: Callable[[str], None],
    resume: int | None,
    node_spec: NodeSpec,
    start_workers: StartWorkers,
) -> Summary:
    started = time.perf_counter()
    if resume is None:
        claim(out)
    try:
        with met(config, node_spec, out, resume, on_notice) as node_group:
            resume = node_group.facts.get("resume", resume)
            with (
                Loggers(config, out, resume) as loggers,
                Records(config, out, on_line, on_notice, node_group, loggers, resume) as records,
            ):
                results = _start(config, out, resume, records.take, node_group, start_workers)
                finished = [result for result in results if result is not None]
                if len(finished) < len(results):
                    raise Interrupted(out, node_spec)
                summary = summarise(config, finished, time.perf_counter() - started)
                partial = out / "summary.partial"
                partial.write_text(as_json(summary, indent=2) + "\n", encoding="utf-8")
                os.replace(partial, out / SUMMARY)
                loggers.summary(summary)
    except BaseException as error:  # Ctrl-C too
        say_what_is_left(error, out, node_spec)
        raise
    clear_logs(out)
    return summary


class Interrupted(KeyboardInterrupt):
    """The run was stopped after inner step `step`, of the newest checkpoint in `out`; None where there is none: a run
    that lost workers saves no more.
    """

    def __init__(self, out: Path, node_spec: NodeSpec) -> None:
        self.out, self.step = out, max(Checkpoints(out).steps(), default=None)
        super().__init__(
            "stopped; there is no checkpoint, for a worker was lost before the first"
            if self.step is None
            else f"stopped after step {self.step}, checkpoint saved; go on with: isles resume {out}{node_spec.flags}"
        )


def _last_line(error: Exception) -> str:
    return (error.report if isinstance(error, WorkerFailed) else str(error)).splitlines()[-1]


def _start(
    config: Config,
    out: Path,
    resume: int | None,
    on_event: Callable[[Any], None],
    node_group: NodeGroup,
    start_workers: StartWorkers,
) -> list[dict[str, Any] | None]:
    world, args = config.world, (config, out, resume)
    if world.backend == "virtual":
        corpus = load_corpus(config.data)  # once: looking at its files takes longer than a small step
        with _warnings_told(on_event):
            return on_virtual(train_worker, world.workers, config, (*args, corpus), on_event)
    pool = start_workers(config, out, resume, node_group)

    def tell(rank: int, error: Exception) -> None:
        on_event({"notice": f"worker {rank} failed ({_last_line(error)}); the others go on, without checkpoints"})

    with first_interrupt(pool.stop):
        results = pool.join(on_event, tell if config.replicas.survives else None)
    left = [result for rank, result in enumerate(results) if rank not in pool.failures]
    if not (config.replicas.survives and left):
        raise_first(results, pool.failures)
    return left


def on_virtual(
    worker: Callable[..., Any], workers: int, config: Config, args: Sequence[Any], on_event: Callable[[Any], None]
) -> list[Any]:
    """`worker(world, *args)` on the virtual backend that [world] describes; the first Ctrl-C stops all at one step."""
    world, stop_control = config.world, SharedStopControl(workers)
    with first_interrupt(stop_control.ask):
        return run_virtual(
            worker,
            workers,
            args=args,
            links=world.links,
            inner=world.inner,
            inner_links=world.inner_links,
            threads=world.threads,
            step_seconds=step_seconds(config),
            speeds=replace(world, workers=workers).factors,
            compute_jitter=world.step_jitter,
            pauses=world.pauses,
            seed=config.run.seed,
            deadlines=deadlines(config),
            on_event=on_event,
            stop_control=stop_control,
        )


def start_processes(config: Config, out: Path, resume: int | None, node_group: NodeGroup) -> Workers:
    """Start this machine's workers."""
    start_server()
    return LocalWorkers(
        train_process,
        config.world.workers,
        args=(config, out, resume),
        threads=config.world.threads,
        deadlines=deadlines(config),
        logs=out / LOGS,
        node_group=node_group,
    )


def deadlines(config: Config) -> Deadlines:
    """The waits that [world] asks for. A deadline tells a lost worker from a slow one; one that pauses comes back, so
    who cannot go on alone waits for it however long it stays away.
    """
    world = config.world
    own = Deadlines(outer=world.outer_deadline, slowest_link=world.slowest_link)
    if world.pauses is None:
        return own
    patience = {
        name: max(_PAUSES * world.pause_seconds, own.of(name)) for name in ("control", "inner", "outer", "eval")
    }
    return replace(own, **(patience | ({"outer": own.outer} if config.replicas.survives else {})))


@contextlib.contextmanager
def first_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls `stop` once; a second is KeyboardInterrupt as ever. Outside of the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def first(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        stop()

    before = signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def train_process(world: Mesh, config: Config, out: Path, resume: int | None) -> dict[str, Any] | None:
    """`train_worker` in a process of its own. What worker 0 is warned of, the user is told; the others have logs."""
    with _warnings_told(world.report) if world.rank == 0 else contextlib.nullcontext():
        return train_worker(world, config, out, resume)


@contextlib.contextmanager
def _warnings_told(tell: Callable[[Any], None]) -> Iterator[None]:
    """Python warnings become notices to the user, each once, instead of source lines on stderr."""
    told: set[str] = set()

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        text = " ".join(str(message).split())
        if text not in told:
            told.add(text)
            tell({"notice": text})

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def summarise(config: Config, results: list[dict[str, Any]], wall_seconds: float) -> Summary:
    """The contents of summary.json from what the workers returned. Means are over workers; a loss is None where no text
    was kept for validation. Where there are islands: how many, and bytes of the exchanges across them.
    """

    def mean(key: str) -> float:
        return sum(result[key] for result in results) / len(results)

    compute, blocked = mean("compute_seconds"), mean("blocked_seconds")
    first, islands = results[0], config.world.islands
    across = {"islands": islands, "bytes_across_per_worker": mean("bytes_across")} if config.world.inner > 1 else {}
    return {
        "isles_version": __version__,
        "method": config.method,
        "backend": config.world.backend,
        "workers": len(results),
        **across,
        "steps": config.run.steps,
        "tokens": sum(result["tokens"] for result in results),
        "parameters": first["parameters"],
        "val_loss": first["val_loss"],
        "val_loss_replicas": None if first["val_loss_replica"] is None else mean("val_loss_replica"),
        "replica_std": first["replica_std"],
        "bytes_sent_per_worker": mean("bytes_sent"),
        "bytes_received_per_worker": mean("bytes_received"),
        "ddp_bytes_per_worker": first["ddp_bytes"],
        "compute_seconds": compute,
        "blocked_seconds": blocked,
        "compute_utilisation": compute / (compute + blocked) if compute + blocked else 1.0,
        "train_seconds": max(result["train_seconds"] for result in results),
        "wall_seconds": wall_seconds,
        "virtual_seconds": max(r["virtual_seconds"] for r in results) if config.world.backend == "virtual" else None,
        "seed": config.run.seed,
        "corpus_sha256": first["corpus_sha256"],
        **first["memory"],
    }
