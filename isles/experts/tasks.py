"""Pieces of work that wait for each other: one after another in this process, or several at once in processes of their
own. What comes out is the same to the bit.

launcher                                  process of a task
starts it when what it needs is done ---> works
                                     <--- ("told" | "done" | "stopped" | "failed", what)
SIGINT: stop, with a checkpoint      ---> ends by KeyboardInterrupt; also when the launcher is gone, then at once

A task that fails keeps new ones from starting; those under way go on to their end, and then its error is raised. The
processes stand apart from the terminal's group, so that the first Ctrl-C reaches each of them once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

from isles.comm.errors import CommError, from_plain, to_plain
from isles.errors import warnings_told
from isles.experts.jobs import JobProgress
from isles.training.running.interrupts import Interrupts, first_interrupt
from isles.training.running.server import start_server

_GLANCE = 0.2  # seconds between looks at whether a stop is wanted


@dataclass(frozen=True, kw_only=True)
class ExpertTask:
    """name: unique among those that are carried out together. work: what a fresh process can import. needs: names of
    tasks that must be done before, as far as they are among the others.
    """

    name: str
    work: Callable[[JobProgress], object]
    needs: tuple[str, ...] = ()


def carry_out(tasks: Sequence[ExpertTask], at_once: int, progress: JobProgress) -> None:
    """Do all of them, `at_once` at a time; in their order, which puts each behind what it needs.

    Errors and KeyboardInterrupt as of the work itself; CommError for a process that died.
    """
    if at_once == 1:
        with Interrupts() as interrupts:
            for task in tasks:
                task.work(progress)
                interrupts.check()
    else:
        _Several(tasks, at_once, progress).carry_out()


class _Several:
    def __init__(self, tasks: Sequence[ExpertTask], at_once: int, progress: JobProgress) -> None:
        self.waiting, self.at_once, self.progress = list(tasks), at_once, progress
        self.running: dict[Connection, tuple[ExpertTask, BaseProcess]] = {}
        self.failure: Exception | None = None
        self.stopping = False

    def carry_out(self) -> None:
        start_server()
        try:
            with first_interrupt(self._stop):
                while self.running or self._may_start():
                    self._start_ready()
                    for pipe in cast("list[Connection]", wait(list(self.running), _GLANCE)):
                        self._hear(pipe)
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

    def _hear(self, pipe: Connection) -> None:
        task, process = self.running[pipe]
        try:
            kind, values = cast("tuple[str, Any]", pipe.recv())
        except (EOFError, OSError):
            process.join()
            kind, values = "failed", (to_plain(CommError(f"its process ended with exit code {process.exitcode}")), [])
        if kind == "told":
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
            setattr(self, method, lambda *arguments, method=method: pipe.send(("told", (method, arguments))))


def _serve(task: ExpertTask, pipe: Connection) -> None:
    """The life of a task's process."""
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with_launcher, args=(pipe,), daemon=True).start()
    message: tuple[str, Any] = ("done", None)
    try:
        blocked = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}  # in the server that it was forked from
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
        progress = _Relayed(pipe)
        with warnings_told(lambda event: progress.notice(event["notice"])):
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
