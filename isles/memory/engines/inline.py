"""No lanes: work is done at once by whoever submits it. For workers that share a thread, as on the virtual backend."""

from __future__ import annotations

from collections.abc import Callable

import torch

from isles.memory.engines.base import Engine, EngineLane, LaneEvent, Urgency


class Inline(Engine):
    """Everything at the moment it is asked for."""

    def submit(
        self, lane: EngineLane, urgency: Urgency, seconds: float, work: Callable[[], None], done: Callable[[], None]
    ) -> None:
        """At once."""
        with torch.no_grad():
            work()
        done()

    def wait_for(self, event: LaneEvent, what: str) -> None:
        """Nothing is under way that could bring it."""
        raise RuntimeError(f"memory: {what} cannot come: the plan does not fit its budget")
