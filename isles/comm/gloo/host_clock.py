"""What transports between real processes have in common: a host's clock, and one thread that drives protocols."""

from __future__ import annotations

import math
import time
from typing import Any

from isles.comm.gloo.life import Life
from isles.comm.gloo.transfers import BackgroundTransfer, Driver, HostBell
from isles.comm.tags import Channel
from isles.comm.traffic import Traffic
from isles.comm.transport import Line, Steps


class OnHostClock:
    """Computing takes the time it takes, and nothing of it can be saved."""

    step_seconds = 0.0
    away_seconds = 0.0

    def __init__(self, life: Life | None = None) -> None:
        self.traffic = Traffic()
        self.life = life or Life()
        self._start = time.perf_counter()
        self._driver = Driver(self.now, self.life)

    def run(self, protocol: Steps[Any], channel: Channel, deadline: float) -> BackgroundTransfer:
        """Drive `protocol` in the background; the transfer fails `deadline` seconds after the last sign of life."""
        return self._driver.start(protocol, channel, deadline, self.traffic)

    def bell(self, seconds: float = math.inf) -> HostBell:
        """On the host's clock; the thread that drives protocols rings it."""
        return self._driver.bell(seconds)

    def line(self) -> Line | None:
        """By the kernel's counters."""
        return self.life.line()

    def now(self) -> float:
        """Seconds since this transport was made, host clock."""
        return time.perf_counter() - self._start

    def compute(self, seconds: float) -> None:
        """Nothing: the host's clock runs by itself."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing to save: clocks are the host's."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""
