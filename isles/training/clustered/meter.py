"""What a worker of a run in clusters tells of itself: lines of metrics, spans of time, its share of the summary."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from isles.comm.errors import WorkerFailed
from isles.comm.mesh import Mesh
from isles.network.routing.events import Span
from isles.schema import Metrics
from isles.training.config.inner import lr_factor
from isles.training.config.sections import Config
from isles.training.records.timeline import Timeline
from isles.training.step import WAITS
from isles.training.step_clock import StepClock


class NodeMeter:
    """One worker's. Seconds are those of its clock, and of its GPU's events (`StepClock`)."""

    def __init__(self, config: Config, world: Mesh, device: torch.device) -> None:
        self.config, self.world, self.clock_before = config, world, 0.0
        self._steps = StepClock(world.transport, device, simulated=config.world.is_simulated)
        self._left_over: list[Tensor] = []
        """Losses since the last line."""
        self._taken = 0
        """Losses of the stretch under way that are among them, or were told."""
        self._started = time.perf_counter()
        self._timeline = Timeline(world.rank)

    @property
    def clock(self) -> float:
        """Of the run, those before it was resumed included."""
        return self.clock_before + self.world.transport.now()

    def stretch(self) -> AbstractContextManager[None]:
        """Around a stretch, with all that follows it."""
        self._taken = 0
        return self._steps.step(self._timeline)

    def take(self, losses: Sequence[Tensor]) -> None:
        """Those of the stretch so far."""
        self._left_over += losses[self._taken :]
        self._taken = len(losses)

    def drop(self) -> None:
        """What was trained since the last line is worth nothing."""
        self._left_over.clear()

    def line(self, step: int, tokens: int, val_loss: float | None, gauges: dict[str, float]) -> None:
        """A line of metrics, where there is a loss to tell. WorkerFailed where it is no number."""
        if not self._left_over:  # it has just taken a place
            return
        values = torch.stack(self._left_over).tolist()
        self._left_over.clear()
        if not all(map(math.isfinite, values)):
            raise self.diverged(f"its loss is not finite by inner step {step}")
        self._steps.read()
        traffic, config = self.world.world.traffic, self.config
        blocked = traffic.total("blocked_seconds", *WAITS)
        line = Metrics(
            step=step,
            worker=self.world.rank,
            loss=sum(values) / len(values),
            lr=lr_factor(step, config.run.steps, config.inner) * config.inner.lr,
            tokens=tokens,
            bytes_sent=int(traffic.total("bytes_sent")),
            bytes_received=int(traffic.total("bytes_received")),
            blocked_seconds=blocked,
            compute_seconds=self._steps.so_far() - blocked,
            clock_seconds=self.clock,
            val_loss=val_loss,
            **self._steps.usage(None, tokens),
        )
        self.world.report(asdict(line) | gauges)
        self._tell(self._timeline.take(step, traffic.take_spans(), self.clock_before))

    def stop(self) -> None:
        """The newest spans, where the run is stopped."""
        self._tell(self._timeline.rest())

    def conclude(self, step: int, played: Sequence[Span]) -> None:
        """All spans that were not told yet, and the tasks of the last step."""
        self._steps.read()
        self._timeline.take(step, self.world.world.traffic.take_spans(), self.clock_before)
        self._tell(self._timeline.rest() + self._timeline.tasks(step, played, self.clock_before))

    def totals(self) -> dict[str, Any]:
        """Of its share of the summary what was counted so far."""
        traffic = self.world.world.traffic
        blocked = traffic.total("blocked_seconds", *WAITS)
        return {
            "bytes_sent": int(traffic.total("bytes_sent")),
            "bytes_received": int(traffic.total("bytes_received")),
            "compute_seconds": self._steps.seconds - blocked,
            "blocked_seconds": blocked,
            "train_seconds": time.perf_counter() - self._started,
            "virtual_seconds": self.clock,
            "channels": traffic.by_channel(),
        }

    def diverged(self, what: str) -> WorkerFailed:
        """With what to change."""
        return WorkerFailed(self.world.rank, f"{what}: lower inner.lr (now {self.config.inner.lr:g})")

    def state_dict(self) -> dict[str, Any]:
        """The running totals, and the clock."""
        self._steps.read()
        return {
            "losses": torch.stack(self._left_over) if self._left_over else None,
            "traffic": self.world.world.traffic.state_dict(),
            "transport": self.world.transport.state_dict(),
            "training_seconds": self._steps.seconds,
            "clock_seconds": self.clock,
            "host_seconds": time.perf_counter() - self._started,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on from `state_dict`."""
        self._left_over = [] if state["losses"] is None else list(state["losses"].to(device))
        self.world.transport.load_state_dict(state["transport"])
        self.world.world.traffic.load_state_dict(state["traffic"])
        self._steps.seconds = state["training_seconds"]
        self._started = time.perf_counter() - state["host_seconds"]
        self.come_back(state)

    def come_back(self, state: dict[str, Any]) -> None:
        """Take part again in a run whose clock another worker's state tells."""
        self.clock_before = state["clock_seconds"] - self.world.transport.now()
        self._timeline = Timeline(self.world.rank, resumed=True)

    def _tell(self, spans: list[dict[str, Any]]) -> None:
        if spans:
            self.world.report({"spans": spans})
