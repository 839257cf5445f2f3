"""What Ctrl-C, and a polite request to end, do to a run. Loads no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any


class GraceOver(KeyboardInterrupt):
    """Who was asked to end has not come to it within `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"not ended within {seconds:g} s")
        self.seconds = seconds


@contextlib.contextmanager
def first_interrupt(stop: Callable[[], None], grace: float | None = None) -> Iterator[None]:
    """Ctrl-C, SIGTERM (a scheduler, a spot market) and SIGHUP (a closed terminal, unless it is ignored) call `stop`
    once; a second is what it was before. Outside of the main thread nothing changes, and nothing stays behind.

    grace: seconds after SIGTERM or SIGHUP until GraceOver; None: no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if isinstance(around := signal.getsignal(signal.SIGINT), Interrupts):
        around.check()
    numbers = [signal.SIGINT, signal.SIGTERM]
    numbers += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []

    def first(number: int, frame: object) -> None:
        for one, handler in before.items():
            signal.signal(one, handler)
        interrupts = before[signal.SIGINT]
        if isinstance(interrupts, Interrupts):
            interrupts.asked = True
        if number == signal.SIGHUP:
            _leave_the_terminal()
        if number != signal.SIGINT and grace is not None:
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


def notify_in_handler(text: str) -> None:
    """Print a line in a signal handler: whoever prints may be in the middle of it."""
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), f"isles: {text}\n".encode())


def _leave_the_terminal() -> None:
    """What is printed to one that was closed is an error, and would end the run before it has saved."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


class Interrupts:
    """Around several pieces of work, one after another: a Ctrl-C that came too late for the one under way, which was
    done by then, stops those after it. So does one whose KeyboardInterrupt was lost: where C code calls back into
    Python, as many a library does while it is imported, an exception is printed and goes no further. Elsewhere it is
    KeyboardInterrupt as ever.
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
        """KeyboardInterrupt where Ctrl-C was pressed. Called before each piece."""
        if self.asked:
            raise KeyboardInterrupt
