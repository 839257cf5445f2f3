"""Processes that begin as a fresh command does, but forked from one that has loaded torch: a tenth of the CPU time.

    command = Forked("train", "tiny.toml", folder=folder)       # as tests.cli.command.Command runs it
    code, out, error = command.end()

Each has a session of its own, signals as a shell leaves them, and where it starts a fork server, as launchers do, that
is a fork of it too. What is about loading, or about how a Python begins and ends, needs a `Command`.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

import psutil

from isles.running.backends import PRELOAD, start_server

PATIENCE = 90.0  # seconds for what takes a few on an idle machine


class Process:
    """`target(*arguments)` in `folder`."""

    def __init__(self, target: Callable[..., Any], *arguments: Any, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        (out, out_there), (error, error_there) = context.Pipe(False), context.Pipe(False)
        self.process = context.Process(target=_begun, args=(out_there, error_there, str(folder), target, arguments))
        self.process.start()
        out_there.close()
        error_there.close()
        assert self.process.pid is not None
        self.pid: int = self.process.pid
        self.said: list[bytes] = [b"", b""]  # on stdout and stderr until now
        self._listeners = [
            threading.Thread(target=self._listen, args=(number, pipe), daemon=True)
            for number, pipe in enumerate((out, error))
        ]
        for thread in self._listeners:
            thread.start()

    def _listen(self, number: int, pipe: Any) -> None:
        with pipe:
            while new := os.read(pipe.fileno(), 65536):
                self.said[number] += new

    def end(self, patience: float = PATIENCE) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) once it and all that hold its pipes have ended; patience: seconds."""
        for wait in (self.process.join, *(thread.join for thread in self._listeners)):
            wait(patience)
        if self.process.exitcode is None or any(thread.is_alive() for thread in self._listeners):
            raise TimeoutError(f"it, or who holds its pipes, goes on after {patience:g} s: {self.said}")
        out, error = (said.decode() for said in self.said)
        return self.process.exitcode, out, error

    def left(self) -> list[psutil.Process]:
        """The processes of its session that are still there."""
        found = []
        for pid in psutil.pids():
            try:
                process = psutil.Process(pid) if os.getsid(pid) == self.pid else None
                if process is not None and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return found


class Forked(Process):
    """`isles ARGUMENTS`. first: called before it."""

    def __init__(self, *arguments: str, folder: Path, first: Callable[[], None] | None = None) -> None:
        super().__init__(command, arguments, first, folder=folder)


def command(arguments: Sequence[str], first: Callable[[], None] | None = None) -> None:
    """The command in this process."""
    from isles import cli

    if first is not None:
        first()
    sys.argv = ["isles", *arguments]
    cli.main()


def _begun(out: Any, error: Any, folder: str, target: Callable[..., Any], arguments: Sequence[Any]) -> None:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, source in enumerate((nothing, out.fileno(), error.fileno())):
        os.dup2(source, number)
    os.close(nothing)
    out.close()
    error.close()
    _open_streams()
    settle(folder)
    target(*arguments)


def _open_streams() -> None:
    """On descriptors 0, 1 and 2, which stay open when another such call replaces them."""
    modes = ("r", "w", "w")
    sys.stdin, sys.stdout, sys.stderr = (open(at, mode, 1, closefd=False) for at, mode in enumerate(modes))  # noqa: SIM115


def forget_isles() -> None:
    """As if this process had loaded torch and nothing of isles."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "isles"]:
        del sys.modules[name]


def start_forked_server() -> None:
    """Start the fork server as a fork of this process: it need not load what the tests have loaded."""
    for name in PRELOAD:
        importlib.import_module(name)
    spawn = util.spawnv_passfds
    util.spawnv_passfds = _forked_server(spawn)
    try:
        start_server()
    finally:
        util.spawnv_passfds = spawn


def settle(folder: str | Path) -> None:
    """As if a shell had started this process in `folder`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.environ["COLUMNS"] = "100"
    os.chdir(folder)
    util.spawnv_passfds = _forked_server(util.spawnv_passfds)


def _forked_server(spawn: Callable[..., int]) -> Callable[..., int]:
    """How multiprocessing starts its helpers, but for the fork server: that need not load what is here already."""

    def start(path: Any, words: Sequence[Any], kept: Sequence[int]) -> int:
        code = words[-1]
        if not (isinstance(code, str) and code.startswith("from multiprocessing.forkserver import main")):
            return spawn(path, words, kept)
        if pid := os.fork():
            return pid
        try:
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, nothing, *kept}:
                os.dup2(nothing, number)  # not closed: the objects here that own them still will do that
            _open_streams()  # pytest's are among them
            forkserver._forkserver.__init__()  # type: ignore[misc]  # its lock is held
            exec(code, {})
        finally:
            os._exit(0)

    return start
