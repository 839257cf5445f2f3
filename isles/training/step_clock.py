"""How long a worker's steps take, and how well they use its GPU.

A GPU does later what the host queues. There a step lasts from an event on its stream to another one, and a wait for
others begins when the GPU has run out of work. Events are read when a line of metrics is due, which waits for the GPU
anyway; the simulated clock needs none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from isles.comm.transport import Transport
from isles.network.machines import known_gpu
from isles.training.records.timeline import Timeline


class StepClock:
    """Of one worker. seconds: of its steps until now, on a GPU until the last `read`, waits for others included."""

    def __init__(self, transport: Transport, device: torch.device, *, simulated: bool) -> None:
        self.seconds = 0.0
        self._transport, self._device = transport, device
        self._queues = device.type == "cuda" and not simulated
        self._began: Any = None
        """Of the step under way: an event, or when it was and the seconds away until then."""
        self._timeline: Timeline | None = None
        self._steps: list[tuple[torch.cuda.Event, torch.cuda.Event, Timeline | None]] = []
        self._last_read = 0.0, 0
        if self._queues:
            transport.traffic.mark = self._mark

    @contextmanager
    def step(self, timeline: Timeline | None = None) -> Iterator[None]:
        """Around an inner step, or several that are counted as one. It does not wait for the GPU. timeline: None for a
        wait between steps, which is not shown as computing.
        """
        self._timeline = timeline
        began: Any = self._mark() if self._queues else (self._transport.now(), self._transport.away_seconds)
        self._began = began
        yield
        if self._queues:
            self._steps.append((self._began, self._mark(), timeline))
        else:
            self.seconds = self.so_far()
            if timeline is not None:
                timeline.step(began[0], self._transport.now())
        self._began = None

    def so_far(self) -> float:
        """`seconds`, with those of the step under way; on a GPU until the last `read`."""
        if self._queues or self._began is None:
            return self.seconds
        began, away = self._began
        return self.seconds + (self._transport.now() - began - (self._transport.away_seconds - away))

    def reading(self) -> float:
        """Seconds until now, from any start: those in which this worker was not away; on a GPU, for which this waits,
        those of its steps.
        """
        self.read()
        return self.seconds if self._queues else self._transport.now() - self._transport.away_seconds

    def read(self) -> None:
        """Count the steps and waits since the last call. On a GPU: wait for it."""
        if not self._queues:
            return
        last = self._mark()
        if self._began is not None:
            self._steps.append((self._began, last, self._timeline))
            self._began = last
        last.synchronize()
        now = self._transport.now()

        def at(mark: torch.cuda.Event) -> float:
            return now - mark.elapsed_time(last) / 1000

        for begun, over, timeline in self._steps:
            self.seconds += begun.elapsed_time(over) / 1000
            if timeline is not None:
                timeline.step(at(begun), at(over))
        self._steps.clear()
        self._transport.traffic.settle(at)

    def usage(self, model: nn.Module | None, tokens: int) -> dict[str, Any]:
        """Of the GPU since the last call, as keys of `Metrics`. model: None for a part of one. tokens: read so far."""
        if self._device.type != "cuda":
            return {}
        seconds, read = self.seconds - self._last_read[0], tokens - self._last_read[1]
        self._last_read = self.seconds, tokens
        usage: dict[str, Any] = {
            "memory_bytes": torch.cuda.memory_allocated(self._device),
            "memory_peak_bytes": torch.cuda.max_memory_allocated(self._device),
            "memory_reserved_bytes": torch.cuda.memory_reserved(self._device),
        }
        if seconds > 0 and read:
            usage["tokens_per_second"] = read / seconds
            gpu = torch.cuda.get_device_properties(self._device)
            card = known_gpu(gpu.name, gpu.total_memory)
            if self._queues and model is not None and card is not None:
                flops = 6 * sum(parameter.numel() for parameter in model.parameters())
                usage["mfu"] = flops * read / seconds / card.peak
        return usage

    def _mark(self) -> torch.cuda.Event:
        mark = torch.cuda.Event(enable_timing=True)
        mark.record(torch.cuda.current_stream(self._device))
        return mark
