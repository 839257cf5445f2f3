"""A worker's watch over its own training thread: one that hangs says so, and is left out until it goes on."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median

from isles.comm.gloo.transfers import OnHostClock
from isles.comm.transport import Transport
from isles.membership.requests import LighthouseClient
from isles.membership.tls_session import Session

_TIMES = 10  # of the usual step
_LOOK = 1.0  # seconds
_RETAINED = 101  # step times
_LAST = 3.0  # seconds for the last report


class StallWatch:
    """Watches the inner steps of a worker, from the third one on, until `stack` ends. A wait for others is no stall,
    nor is anything between two steps.

    client: of the lighthouse. transports: on which the worker waits for others. least: seconds of a stall at least.
    notice: called with a line for the user. hangs: called with whether the thread hangs, at each change.
    """

    def __init__(
        self,
        stack: ExitStack,
        client: LighthouseClient,
        transports: Iterable[Transport],
        least: float,
        notice: Callable[[str], None],
        hangs: Callable[[bool], object],
    ) -> None:
        self._client, self._least, self._notice, self._hangs = client, least, notice, hangs
        self._liveness = [one.liveness for one in transports if isinstance(one, OnHostClock)]
        self._times, self._number, self._begun = deque[float](maxlen=_RETAINED), 0, False
        self._over = threading.Event()
        stack.callback(self._over.set)
        threading.Thread(target=self._watch, name="isles-stall", daemon=True).start()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context for an inner step."""
        began, self._begun = time.monotonic(), True
        yield
        self._begun, self._number = False, self._number + 1
        self._times.append(time.monotonic() - began)

    def _watch(self) -> None:
        still, seen, looked_at, stalls = 0.0, (0, 0.0, 0), time.monotonic(), False
        while not self._over.wait(_LOOK):
            now, waits = time.monotonic(), sum(one.glances for one in self._liveness)
            mark = (self._number, self._client.waited, waits)
            more = min(now - looked_at, 2 * _LOOK)  # time in which this process was stopped does not count
            before, still = still, still + more if mark == seen and self._begun and len(self._times) > 1 else 0.0
            seen, looked_at = mark, now
            usual = median([*self._times] or [0.0])
            if stalls != (still > max(_TIMES * usual, self._least)):
                stalls, line = not stalls, f"this worker goes on after {before:.0f} s"
                if stalls:
                    line = f"this worker has done no step for {still:.0f} s (a step usually takes {usual:.2g} s)"
                    line += ": it is left out until it goes on"
                self._notice(line)
                self._client.report({"notice": line})
                self._hangs(stalls)


def cut_off(client: LighthouseClient, transport: Transport, session: Session) -> None:
    """Break the connections of a worker that hangs, so that all others count it as lost."""
    client.reported(_LAST)
    transport.close()
    session.close()
