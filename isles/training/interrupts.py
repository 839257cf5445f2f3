"""Handling of Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 during a run, and of its time limit. Loads no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any


class GraceOver(KeyboardInterrupt):
    """A run that was asked to end has not ended within `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"not ended within {seconds:g} s")
        self.seconds = seconds


@contextlib.contextmanager
def first_interrupt(stop: Callable[[], None], grace: float | None = None) -> Iterator[None]:
    """Context in which the first Ctrl-C, SIGTERM (a scheduler, a spot market), SIGHUP (a closed terminal, unless it
    is ignored) or SIGUSR1 (Slurm's --signal, before a job's time is over) calls `stop`; a second one has its former
    effect, but SIGUSR1 none. Restores the former handlers; outside of the main thread it does nothing.

    grace: seconds after SIGTERM or SIGHUP until GraceOver; None: no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if isinstance(around := signal.getsignal(signal.SIGINT), Interrupts):
        around.check()
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    numbers += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []

    def first(number: int, frame: object) -> None:
        for one, handler in before.items():
            signal.signal(one, signal.SIG_IGN if one == signal.SIGUSR1 else handler)
        interrupts = before[signal.SIGINT]
        if isinstance(interrupts, Interrupts):
            interrupts.asked = True
        if number == signal.SIGHUP:
            _leave_the_terminal()
        if number in (signal.SIGTERM, signal.SIGHUP) and grace is not None:
            before[signal.SIGALRM] = signal.signal(signal.SIGALRM, over)
            signal.setitimer(signal.ITIMER_REAL, grace)
        stop()

    def over(number: int, frame: object) -> None:
        assert grace is not None
        raise GraceOver(grace)

    before: dict[int, Any] = {}
    for number in numbers:
        before[number] = signal.signal(number, first)
    try:
        yield
    finally:
        if signal.SIGALRM in before:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def time_limit(hours: float, stop: Callable[[], None]) -> Iterator[None]:
    """Context in which `stop` is called after `hours`, in another thread; 0: never."""
    timer = threading.Timer(min(hours * 3600, threading.TIMEOUT_MAX), stop)
    timer.daemon = True
    if hours:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def notify_in_handler(text: str) -> None:
    """Print a line from a signal handler; by `os.write`, as the handler may have interrupted a print."""
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), f"isles: {text}\n".encode())


def _leave_the_terminal() -> None:
    """Redirect output from a closed terminal to the null device: writing there would end the run before it saves."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


class Interrupts:
    """Context around a sequence of tasks: a Ctrl-C that comes too late to stop the current task stops those after it.
    So does one whose KeyboardInterrupt is lost: where C code calls back into Python, as many libraries do while they
    are imported, an exception is only printed. Otherwise Ctrl-C raises KeyboardInterrupt as usual.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            if isinstance(around := signal.getsignal(signal.SIGINT), Interrupts):
                around.check()
            self._before = signal.signal(signal.SIGINT, self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def __call__(self, *_: object) -> None:
        self.asked = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """KeyboardInterrupt if Ctrl-C was pressed. Call it before each task."""
        if self.asked:
            raise KeyboardInterrupt
