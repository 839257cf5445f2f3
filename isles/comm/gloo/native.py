"""Collectives of torch's own on GPUs, which nobody waits for: a call only queues them, on NCCL's streams.

A lost member leaves the others' kernels turning for ever. So each collective is looked at until it is over. Where a
member is gone, or none of its group's has ended for `silence` seconds, the group is aborted, the member that has given
no sign of life for longest is named, and the next call over these ranks raises that; the group is made anew after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from isles.comm.errors import PeerLost
from isles.comm.gloo.life import GLANCE, Life
from isles.comm.gloo.transfers import PostedWork

_SOON = 0.0005  # seconds between looks at one that somebody waits for


class NativeGroup:
    """torch's group of `ranks`, of which this worker is `rank`."""

    def __init__(self, processes: Any, rank: int, ranks: tuple[int, ...], life: Life, silence: float) -> None:
        self.processes, self._rank = processes, rank
        self._others = [other for other in ranks if other != rank]
        self._life, self._silence = life, silence
        self._ended = 0.0  # when the newest of its collectives was seen to be over
        self.error: PeerLost | None = None

    def follow(self, message: list[Any], work: PostedWork | None = None) -> Callable[[], None]:
        """Look at a collective until it is over, or the group is lost; what then tells of it. message: it alone, let go
        before anyone hears. work: of who waits.
        """
        began = time.monotonic()
        while not message[0].is_completed():
            self._life.look()
            quiet = min(self._others, key=self._liveliness, default=self._rank)
            late = time.monotonic() - max(began, self._ended, self._life.last(quiet)) > self._silence
            why = self._life.gone(quiet) or f"a sum on GPUs has waited for it for {self._silence:g} s"
            if work is not None:
                work.peer = quiet  # it is named where the wait is given up
            if self.error is None and (late or self._life.gone(quiet) is not None):
                self.error = PeerLost(quiet, why)
                self.processes.abort()
            if self.error is not None:
                break
            time.sleep(GLANCE if work is None else _SOON)
        self._ended = time.monotonic()
        message.clear()
        return (lambda: None) if work is None else partial(work.finished, self.error)

    def _liveliness(self, other: int) -> tuple[bool, float]:
        return self._life.gone(other) is None, self._life.last(other)
