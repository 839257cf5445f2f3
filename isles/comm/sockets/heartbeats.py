"""Signs of life: who sends them, and for how long the other side has given none.

Bytes prove nothing about a process: the kernel of one that is frozen goes on acknowledging. So every connection and
every worker says now and then that it is there, whatever its other threads do.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from isles.comm.stopping import LeaveControl

BEAT = 2.0  # seconds between signs of life
_STOOD = 2.0  # seconds between two looks that count at most: beyond it this side stood still itself


class Silence:
    """For how long the other side has said nothing, as seen by one that looks often.

    seconds: after which it counts as lost. first: the same until its first word, for programs start slowly.
    """

    def __init__(self, seconds: float, first: float | None = None) -> None:
        self.seconds = seconds
        self._first: float | None = seconds if first is None else max(first, seconds)
        self._heard = self._looked = time.monotonic()
        self._longer = 0.0

    def heard(self) -> None:
        """Something came."""
        self._heard, self._first, self._longer = time.monotonic(), None, 0.0

    @property
    def has_heard(self) -> bool:
        """Whether anything ever came."""
        return self._first is None

    @property
    def limit(self) -> float:
        """Seconds after which it counts as lost now."""
        return self.seconds if self._first is None else self._first

    def over(self, longer: float = 0.0) -> bool:
        """A look: whether the silence exceeds the limit and `longer`: the largest in this silence, and at most the
        limit once more (the other side's kernel waits about as long as this one). What has come must be read first.
        """
        now = time.monotonic()
        self._heard = min(self._heard + max(now - self._looked - _STOOD, 0.0), now)
        self._looked = now
        self._longer = max(self._longer, min(longer, self.seconds))
        return now - self._heard > self.limit + self._longer


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
