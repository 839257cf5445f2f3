"""The training loop that all workers share: steps until the last one, and their records.

a step, or several -> validate -> a line of metrics, and the first spans of time -> checkpoint -> stop, or go on
at the end: the last spans, and its share of the summary

Timing of steps: a GPU runs asynchronously to the host, so a step lasts from one CUDA event to another, and a wait for
other workers begins when the GPU has no work left. Events are read when a line of metrics is due, which waits for the
GPU anyway. The simulated clock needs no events.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from isles.base.memory import free_memory
from isles.base.schema import Metrics
from isles.comm.codecs import codec
from isles.comm.collectives.mean import sent_bytes
from isles.comm.mesh import Mesh
from isles.comm.transport import Transport
from isles.network.machines import known_gpu
from isles.network.routing.events import Span
from isles.training.config.inner import lr_factor
from isles.training.config.sections import Config, RunConfig
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.saver import StateSaver
from isles.training.records.shard import refuse_losses, refuse_state
from isles.training.records.timeline import Timeline
from isles.training.step import WAITS, Losses, Text, draws_state, restore_draws


def checkpoint_steps(run: RunConfig) -> int:
    """Steps between checkpoints that workers write by themselves; 0: none."""
    return run.checkpoint_every if isinstance(run.checkpoint_every, int) else 0


def rate_schedule(optimizer: Optimizer, config: Config) -> LambdaLR:
    """The learning rate schedule, stepped after each inner step. A delayed update has the rate of its own step."""
    late = config.pipeline.swarm.delay_updates
    return LambdaLR(optimizer, lambda done: lr_factor(max(done + 1 - late, 1), config.run.steps, config.inner))


def load_schedule(schedule: LambdaLR, state: dict[str, Any]) -> None:
    """Continue from `state`, also if the run has another last step since: the next step has its schedule's rate."""
    schedule.load_state_dict(state)
    rows = zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True)
    for group, rate, factor in rows:
        group["lr"] = rate * factor(schedule.last_epoch)


class StepClock:
    """Measures one worker's steps. seconds: of all steps so far (on a GPU: until the last `read`), including waits for
    other workers.
    """

    def __init__(self, transport: Transport, device: torch.device, *, simulated: bool) -> None:
        self.seconds = 0.0
        self._transport, self._device = transport, device
        self._queues = device.type == "cuda" and not simulated
        self._began: Any = None
        """Start of the current step: a CUDA event, or the time and the paused seconds (`away_seconds`) until then."""
        self._timeline: Timeline | None = None
        self._steps: list[tuple[torch.cuda.Event, torch.cuda.Event, Timeline | None]] = []
        self.last_read = 0.0, 0
        if self._queues:
            transport.traffic.mark = self._mark

    @contextmanager
    def step(self, timeline: Timeline | None = None) -> Iterator[None]:
        """Context for an inner step, or several that count as one. Does not wait for the GPU. timeline: None for a wait
        between steps, which is not shown as computing.
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
        """`seconds` with those of the current step; on a GPU until the last `read`."""
        if self._queues or self._began is None:
            return self.seconds
        began, away = self._began
        return self.seconds + (self._transport.now() - began - (self._transport.away_seconds - away))

    def reading(self) -> float:
        """Seconds until now without pauses, for differences; on a GPU, for which this waits, seconds of its steps."""
        self.read()
        return self.seconds if self._queues else self._transport.now() - self._transport.away_seconds

    def read(self) -> None:
        """Count the steps and waits since the last call. Waits for the GPU, if there is one."""
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
        """The tokens per second since the last call, and a GPU's usage, as keys of `Metrics`. model: None if it is only
        a part of one. tokens: read so far.
        """
        seconds, read = self.seconds - self.last_read[0], tokens - self.last_read[1]
        self.last_read = self.seconds, tokens
        usage: dict[str, Any] = {"tokens_per_second": read / seconds} if seconds > 0 and read > 0 else {}
        if self._device.type != "cuda":
            return usage
        usage |= {
            "memory_bytes": torch.cuda.memory_allocated(self._device),
            "memory_peak_bytes": torch.cuda.max_memory_allocated(self._device),
            "memory_reserved_bytes": torch.cuda.memory_reserved(self._device),
        }
        if "tokens_per_second" in usage:
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


class TrainingLoop(ABC):
    """One worker's loop. name: of the run's configuration. device: that it computes on. model: the whole model, if this
    worker runs all of it.

    validates: whether there is validation text. tokens: read so far. losses: since the last line of metrics.
    """

    validates, losses_a_step = False, 1

    def __init__(self, config: Config, world: Mesh, name: str, device: torch.device, model: nn.Module | None) -> None:
        self.config, self.world, self.name, self.device = config, world, name, device
        self._measured = model
        self.tokens = 0
        self.clock_before = 0.0
        self.started = time.perf_counter()
        self.losses: list[Tensor] = []
        self.timeline = Timeline(world.rank)
        self.step_clock = StepClock(world.transport, device, simulated=config.world.is_simulated)
        self._saver = StateSaver(self._copy_memory)

    @abstractmethod
    def steps_done(self) -> int:
        """Inner steps so far."""

    @abstractmethod
    def step(self) -> None:
        """One inner step, or several at once."""

    @abstractmethod
    def validate(self) -> Losses:
        """Validation losses of this worker's weights, nats per token."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All state that this worker's next steps depend on, and `records`: live tensors, no copies."""

    @abstractmethod
    def conclude(self, out: Path | None) -> dict[str, Any]:
        """Evaluate, and write the run's model; returns this worker's share of the summary."""

    @abstractmethod
    def played(self) -> Sequence[Span]:
        """The tasks of the last inner step on this worker; empty if the model is not cut."""

    def run(self, out: Path | None) -> dict[str, Any] | None:
        """Train the remaining steps; the first worker writes OUT/model.safetensors. Returns this worker's share of the
        summary, or None if the run was stopped (its state is then in a checkpoint).
        """
        with self._saver:
            while self.steps_done() < self.config.run.steps:
                self.step()
                self._saver.check()
                if self._stops_after(self.steps_done(), out):
                    self._report_last_spans()
                    return None
        return self.conclude(out)

    def _stops_after(self, step: int, out: Path | None) -> bool:
        """Validate, report and save, as far as they are due; returns whether to stop."""
        run, ends = self.config.run, step == self.config.run.steps
        validating = self.validates and run.validate_every and step % run.validate_every == 0 and not ends
        if validating or step % run.log_every == 0 or ends:
            self.report(self.validate() if validating else {})
        stopping = self.world.stop_here(step) and not ends
        due = self._saves_last() if ends else self._saves_after(step)
        if out is not None and (stopping or due):
            self._refuse_not_finite(step, self.losses)
            self._save(out, step)
        return stopping

    def _saves_after(self, step: int) -> bool:
        every = checkpoint_steps(self.config.run)
        return bool(every) and step % every == 0

    def _saves_last(self) -> bool:
        """Whether to save the state of the last step, from which `isles resume --steps` goes on."""
        run = self.config.run
        return self.config.world.has_processes if run.checkpoint_every == "auto" else self._saves_after(run.steps)

    def _save(self, out: Path, step: int) -> None:
        """Save this worker's part of the checkpoint of `step`."""
        self.saves(out, step, self.state_dict())

    def saves(self, out: Path, step: int, state: dict[str, Any]) -> None:
        """Write this worker's state of a checkpoint, behind the training where it can be."""

        def write(state: dict[str, Any]) -> None:
            self.refuse_broken(step, state)
            Checkpoints(out).write_shard(step, self.world.rank, state, self.name)
            self.world.report({"checkpoint": step, "worker": self.world.rank})

        self._saver.save(state, write)

    def _copy_memory(self) -> float:
        """Bytes that a copy of the state may take: half of what is free, shared by the workers. None on the virtual
        clock, whose events have an order, and none where the state is larger than the memory that it is to be in.
        """
        if self.config.world.is_simulated or self.config.memory.method not in ("none", "checkpoint"):
            return 0.0
        return free_memory() / (2 * self.config.world.workers)

    def _refuse_not_finite(self, last: int, losses: Sequence[Tensor]) -> None:
        refuse_losses(self.config, self.world.rank, last, losses, each=self.losses_a_step)

    def refuse_broken(self, step: int, state: Mapping[str, Any]) -> None:
        """NotFinite if the state to be saved is not finite."""
        refuse_state(self.config, self.world.rank, step, state, self._finite())

    def _finite(self) -> Container[str]:
        """Names of the weights that must be finite; others may hold infinities."""
        return ()

    # Records

    def clock(self) -> float:
        """Seconds of the run, including those before it was resumed."""
        return self.clock_before + self.world.transport.now()

    def report(self, losses: Losses) -> None:
        """Report metrics and spans to the launcher."""
        self.world.report(asdict(self.metrics()) | losses | self._gauges())
        self._report_spans(
            self.timeline.take(self.steps_done(), self.world.world.traffic.take_spans(), self.clock_before)
        )

    @abstractmethod
    def gradient_norm(self) -> Tensor | None:
        """Norm () of the last step's gradient before clipping; None if nothing is clipped."""

    @abstractmethod
    def _gauges(self) -> dict[str, float]:
        """Additional entries of a line of metrics."""

    def metrics(self) -> Metrics:
        step = self.steps_done()
        self._refuse_not_finite(step, self.losses)
        loss = self._mean(self.losses) if self.losses else math.nan
        self.losses.clear()
        self.step_clock.read()
        return Metrics(
            step=step,
            worker=self.world.rank,
            loss=loss,
            lr=lr_factor(step, self.config.run.steps, self.config.inner) * self.config.inner.lr,
            tokens=self.tokens,
            **self._counted(),
            clock_seconds=self.clock(),
            gradient_norm=None if (norm := self.gradient_norm()) is None else float(norm),
            **self.step_clock.usage(self._measured, self.tokens),
        )

    def _counted(self) -> dict[str, Any]:
        """The entries that `metrics` and `totals` share."""
        traffic = self.world.world.traffic
        blocked = traffic.total("blocked_seconds", *WAITS)
        return {
            "bytes_sent": int(traffic.total("bytes_sent")),
            "bytes_received": int(traffic.total("bytes_received")),
            "compute_seconds": self.step_clock.so_far() - blocked,
            "blocked_seconds": blocked,
        }

    def _mean(self, losses: Sequence[Tensor]) -> float:
        return float(torch.stack(list(losses)).mean())

    def _report_spans(self, spans: list[dict[str, Any]]) -> None:
        if spans:
            self.world.report({"spans": spans})

    def _report_last_spans(self) -> None:
        tasks = self.timeline.tasks(self.steps_done(), self.played(), self.clock_before)
        self._report_spans(self.timeline.rest())
        self._report_spans(tasks)

    def totals(self) -> dict[str, Any]:
        """This worker's counters and times for the summary; reports all remaining spans."""
        self.step_clock.read()
        traffic = self.world.world.traffic
        self.timeline.take(self.steps_done(), traffic.take_spans(), self.clock_before)
        self._report_last_spans()
        return {
            **self._counted(),
            "train_seconds": time.perf_counter() - self.started,
            "virtual_seconds": self.clock(),
            "channels": traffic.by_channel(),
        }

    def compared(self, parameters: int, dtype: torch.dtype, workers: int, text: Text | None) -> dict[str, Any]:
        """The summary's entries on the bytes that ddp would have sent for `parameters`, and on the text."""
        ddp = [sent_bytes(parameters, dtype, codec("none"), workers, position) for position in range(workers)]
        sha256 = "" if text is None else text.corpus.sha256
        return {"ddp_bytes": self.config.run.steps * sum(ddp) / len(ddp), "corpus_sha256": sha256}

    def records(self) -> dict[str, Any]:
        """The running totals, the clock, and the random generators' states, for a checkpoint."""
        self.step_clock.read()
        return {
            "losses": torch.stack(self.losses) if self.losses else None,
            "training_seconds": self.step_clock.seconds,
            "clock_seconds": self.clock(),
            "host_seconds": time.perf_counter() - self.started,
            **draws_state(self.device),
        }

    def load_records(self, state: dict[str, Any]) -> None:
        self.losses = [] if state["losses"] is None else list(state["losses"].to(self.device))
        self.step_clock.seconds = state["training_seconds"]
        self.step_clock.last_read = self.step_clock.seconds, self.tokens
        self.started = time.perf_counter() - state["host_seconds"]
        self.go_on_at(state["clock_seconds"])
        restore_draws(state, self.device)

    def go_on_at(self, seconds: float) -> None:
        """Set the clock of a resumed run, which has taken `seconds` so far."""
        self.clock_before = seconds - self.world.transport.now()
        self.timeline = Timeline(self.world.rank, resumed=True)
