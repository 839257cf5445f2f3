"""Signs of life between a worker and its launcher, and between launchers: who sends them, and who misses them.

Bytes prove nothing about a process: the kernel of one that is frozen goes on acknowledging. So every worker has a
thread that says "here" every two seconds, whatever its other threads do.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from isles.comm.sockets.silence import BEAT
from isles.comm.stopping import LeaveControl


def no_sign_of_life(seconds: float) -> str:
    """What a worker is said to have failed of that was silent for so long."""
    return f"no sign of life for {seconds:g} s: its process is stopped or its machine frozen"


def begin_pulse(
    send: Callable[[tuple[str, Any]], None],
    closing: threading.Event,
    moved: Callable[[], int],
    asked: threading.Event,
    leaving: LeaveControl,
) -> None:
    """A worker's thread of signs of life: ("beat", bytes that its connections have moved) until `closing`.

    asked: where it is set, somebody has asked this process to end; passed on to `leaving`.
    """

    def beat() -> None:
        with contextlib.suppress(OSError, EOFError):
            while not closing.is_set():
                send(("beat", moved()))
                if asked.wait(BEAT):
                    asked.clear()
                    leaving.ask()

    threading.Thread(target=beat, name="isles-pulse", daemon=True).start()
