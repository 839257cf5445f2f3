"""One expert's training as an ordinary run: trained once, gone on with where it stopped, and described.

ExpertJob -> run.launch (any replica method, any workers) -> FOLDER/NAME/ (a run directory) + expert.json

A job's name says all that decides its weights within its folder, so two experts never share a run directory, and
systems that need the same expert share the run. Nothing crosses between jobs but the weights that one starts from.

Tasks that depend on each other run one after another in this process, or several at once in processes of their own,
with the same results to the bit.

launcher                                  process of a task
starts it when what it needs is done ---> works
                                     <--- ("call" | "done" | "stopped" | "failed", what)
SIGINT: stop, with a checkpoint      ---> ends by KeyboardInterrupt; also when the launcher has died, then at once

A task that fails keeps new ones from starting; running ones go on to their end, and then its error is raised. The
processes stand apart from the terminal's group, so that the first Ctrl-C reaches each of them once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from isles.base.errors import notify_warnings
from isles.base.parsing import parse_json
from isles.comm.errors import CommError, from_plain, to_plain
from isles.experts.ensemble import make_average
from isles.models import flops_per_token, limits
from isles.running.backends import start_server
from isles.running.run import launch
from isles.training.config.reading import read_config
from isles.training.config.sections import Config
from isles.training.interrupts import Interrupts, first_interrupt
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.reshard import prepare
from isles.training.records.rundir import CONFIG, SUMMARY, discard_beginning

CARD, WEIGHTS = "expert.json", "model.safetensors"
# What may differ where a run was made on another machine: where things lie, and how its workers were run.
_SLOTS = {"data": ("path", "cache"), "run": ("start", "loggers")}


@dataclass(frozen=True, kw_only=True)
class ExpertJob:
    """name: of the run directory. config: the whole run. role: "seed", "expert", "random" or "dense". domains: what the
    weights have seen since the seed, in order. parents: names of the jobs of the same folder whose average, by their
    posterior on the job's text, it starts from (`averages`; `run.start` says where that average lies).
    """

    name: str
    config: Config
    role: str
    domains: tuple[str, ...] = ()
    parents: tuple[str, ...] = ()

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the jobs that must be done before, all of the same folder."""
        start = self.config.run.start
        return self.parents or ((Path(start).name,) if start else ())

    @property
    def flops(self) -> float | None:
        """Training FLOPs by formula; None for a model of the user's own."""
        model = self.config.model
        return None if model.own is not None else float(flops_per_token(model.shape())) * self.tokens

    @property
    def tokens(self) -> int:
        config, context = self.config, limits(self.config.model).context
        sequences = config.data.batch_size_per_worker(config.world.workers) * config.world.workers
        return config.run.steps * sequences * config.inner.accumulation * context


class JobProgress:
    """What a person is told while jobs run; the command line shows it. Every call may be ignored."""

    def begin(self, name: str, workers: int, steps: int) -> None:
        """A run begins; several may be under way."""

    def line(self, name: str, line: dict[str, Any]) -> None:
        """A line of its metrics."""

    def end(self, name: str) -> None:
        """It ended."""

    def notice(self, text: str) -> None:
        """A remark."""


def configured(base: Config, *, steps: int, path: str, **sections: dict[str, Any]) -> Config:
    """`base` for a run of `steps` on the text of `path`, with other keys in some sections."""
    changes = {"data": {"path": path}, "run": {"steps": steps}}
    merged = {name: {**changes.get(name, {}), **sections.get(name, {})} for name in {*changes, *sections}}
    if getattr(base.replicas, "seed", None) == base.run.seed and "seed" in merged["run"]:
        merged["replicas"] = {"seed": merged["run"]["seed"]}  # it was not given apart, so it follows
    return replace(base, **{name: replace(getattr(base, name), **keys) for name, keys in merged.items()})


def train(job: ExpertJob, folder: Path, progress: JobProgress) -> dict[str, Any]:
    """The job's summary: of the run that is there already, or that is trained (on) now. ValueError where the directory
    holds a run of other settings. KeyboardInterrupt as in `launch`, with a checkpoint.
    """
    out = folder / job.name
    if (out / SUMMARY).is_file():
        _refuse_other(job, out)
        if not (out / WEIGHTS).is_file():
            raise ValueError(f"{out}: no {WEIGHTS} beside {SUMMARY}; copy the whole directory there, or remove it")
        return _carded(job, out)
    steps = Checkpoints(out).steps()
    if steps:
        _refuse_other(job, out)
    elif out.exists():  # cut off before its first checkpoint; held: ValueError while it still goes on
        discard_beginning(out)
    if job.parents:
        make_average(job.parents, folder, Path(job.config.run.start), job.config.data)
    name = f"{folder.name}/{job.name}"
    progress.begin(name, job.config.world.workers, job.config.run.steps)
    resume = prepare(out, None).step if steps else None
    launch(job.config, out, partial(progress.line, name), progress.notice, resume)
    progress.end(name)
    return _carded(job, out)


def state(job: ExpertJob, folder: Path) -> str:
    """ "done", "stopped at step N", "waiting", or what is missing of a run that was done."""
    out = folder / job.name
    if (out / SUMMARY).is_file():
        return "done" if (out / WEIGHTS).is_file() else f"without {WEIGHTS}"
    steps = Checkpoints(out).steps()
    return f"stopped at step {steps[-1]}" if steps else "waiting"


def weights_sha256(run: Path) -> str:
    """Of model.safetensors; equal for equal weights."""
    with (run / WEIGHTS).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _carded(job: ExpertJob, out: Path) -> dict[str, Any]:
    summary = parse_json((out / SUMMARY).read_text(encoding="utf-8"))
    start = job.config.run.start
    facts = {
        "name": job.name,
        "role": job.role,
        "domains": list(job.domains),
        "tokens": summary["tokens"],
        "parameters": summary["parameters"],
        "flops": job.flops,
        "seed_sha256": weights_sha256(Path(start)) if start and (Path(start) / WEIGHTS).is_file() else None,
        "sha256": weights_sha256(out),
        "bytes_to_other_experts": 0,
    }
    if not (out / CARD).exists():
        (out / CARD).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return {**summary, **facts}


def _refuse_other(job: ExpertJob, out: Path) -> None:
    there = read_config(str(out / CONFIG), {}, [])
    if _essence(there) != _essence(job.config):
        raise ValueError(f"{out}: holds a run of other settings; name another --out, or remove that directory")


def _essence(config: Config) -> dict[str, Any]:
    sections: dict[str, Any] = asdict(config)
    return sections | {
        section: {key: value for key, value in sections[section].items() if key not in keys}
        for section, keys in _SLOTS.items()
    }


_GLANCE = 0.2  # seconds between looks at whether a stop is wanted


@dataclass(frozen=True, kw_only=True)
class ExpertTask:
    """name: unique among those that are carried out together. work: what a fresh process can import. needs: names of
    tasks that must be done before, as far as they are among the others.
    """

    name: str
    work: Callable[[JobProgress], object]
    needs: tuple[str, ...] = ()


def run_tasks(tasks: Sequence[ExpertTask], at_once: int, progress: JobProgress) -> None:
    """Do all of them, `at_once` at a time; in their order, which puts each behind what it needs.

    Errors and KeyboardInterrupt as of the work itself; CommError for a process that died.
    """
    if at_once == 1:
        with Interrupts() as interrupts:
            for task in tasks:
                task.work(progress)
                interrupts.check()
    else:
        _Several(tasks, at_once, progress).run_tasks()


class _Several:
    def __init__(self, tasks: Sequence[ExpertTask], at_once: int, progress: JobProgress) -> None:
        self.waiting, self.at_once, self.progress = list(tasks), at_once, progress
        self.running: dict[Connection, tuple[ExpertTask, BaseProcess]] = {}
        self.failure: Exception | None = None
        self.stopping = False

    def run_tasks(self) -> None:
        start_server()
        try:
            with first_interrupt(self._stop):
                while self.running or self._may_start():
                    self._start_ready()
                    for pipe in cast("list[Connection]", wait(list(self.running), _GLANCE)):
                        self._receive(pipe)
        finally:  # also where a second Ctrl-C ends it
            for _, process in self.running.values():
                process.kill()
                process.join()
        if self.failure is not None:
            raise self.failure
        if self.stopping:
            raise KeyboardInterrupt

    def _may_start(self) -> bool:
        return bool(self.waiting) and self.failure is None and not self.stopping

    def _start_ready(self) -> None:
        while self._may_start() and len(self.running) < self.at_once:
            unfinished = {task.name for task in self.waiting} | {task.name for task, _ in self.running.values()}
            ready = next((task for task in self.waiting if not unfinished.intersection(task.needs)), None)
            if ready is None:
                assert self.running, "tasks that wait for each other"
                return
            self.waiting.remove(ready)
            context = multiprocessing.get_context("forkserver")
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(ready, theirs), name=f"isles-{ready.name}")
            process.start()
            theirs.close()
            self.running[ours] = ready, process

    def _receive(self, pipe: Connection) -> None:
        task, process = self.running[pipe]
        try:
            kind, values = cast("tuple[str, Any]", pipe.recv())
        except (EOFError, OSError):
            process.join()
            kind, values = "failed", (to_plain(CommError(f"its process ended with exit code {process.exitcode}")), [])
        if kind == "call":
            method, arguments = values
            getattr(self.progress, str(method))(*arguments)
            return
        del self.running[pipe]
        process.join()
        pipe.close()
        if kind == "failed":
            plain, notes = values
            error = from_plain(plain)
            for note in notes:
                error.add_note(note)
            if self.running:
                self.progress.notice(f"{task.name} failed ({error}); the others that are under way go on to their end")
            self.failure = self.failure or error

    def _stop(self) -> None:
        self.stopping = True
        for _, process in self.running.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(cast(int, process.pid), signal.SIGINT)


class _Relayed(JobProgress):
    """Progress that is shown by the launcher."""

    def __init__(self, pipe: Connection) -> None:
        for method in ("begin", "line", "end", "notice"):
            setattr(self, method, lambda *arguments, method=method: pipe.send(("call", (method, arguments))))


def _serve(task: ExpertTask, pipe: Connection) -> None:
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with_launcher, args=(pipe,), daemon=True).start()
    message: tuple[str, Any] = ("done", None)
    try:
        blocked = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}  # in the server that it was forked from
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        progress = _Relayed(pipe)
        with notify_warnings(lambda event: progress.notice(event["notice"])):
            task.work(progress)
    except KeyboardInterrupt:
        message = ("stopped", None)
    except Exception as error:  # the launcher raises it
        if not isinstance(error, CommError | ValueError | OSError):
            traceback.print_exc()  # a mistake of ours: its words alone would say too little
        message = ("failed", (to_plain(error), list(getattr(error, "__notes__", []))))
    pipe.send(message)


def _end_with_launcher(pipe: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()  # it never says anything
    os._exit(1)
