"""One worker's training run, the same code on every backend.

loader -> forward, backward -> optimizer.step() (reduce, clip, inner step, exchange) -> schedule
every log_every steps: a line of metrics.jsonl goes to the launcher, and a sample of the weights (see `spread`)
at the end: finish, judge the replicas, consolidate, judge the one model, save it
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isles.comm.codecs import codec
from isles.comm.collectives.mean import sent_bytes
from isles.comm.group import Group
from isles.comm.mesh import Mesh
from isles.comm.roster import Roster
from isles.comm.trust import JUMPS
from isles.data import Corpus
from isles.models import autocast, build, limits
from isles.models.factory import take_device
from isles.models.own import check_contract
from isles.models.stages import Stage
from isles.pipeline.boundaries.scheme import Scheme
from isles.pipeline.pipeline import Cut
from isles.pipeline.recovery import Recovery
from isles.replicas.loop.outer import OuterSync
from isles.replicas.sync import ReplicaSync
from isles.schema import Metrics
from isles.staging import to_device
from isles.training.assemble import weighs_samples, wrapped
from isles.training.config.inner import lr_factor
from isles.training.config.reading import run_name
from isles.training.config.sections import Config
from isles.training.cores import take_cores
from isles.training.draws import draws_state, restore_draws
from isles.training.evaluation import validation_loss
from isles.training.expected import expectation
from isles.training.inner_optimizer import rate_schedule
from isles.training.memory.at_work import PlannedMemory
from isles.training.records.checkpoint import Checkpoints
from isles.training.records.finite import refuse_losses, refuse_state
from isles.training.records.saved import save_model, start_weights
from isles.training.records.spread import Sample
from isles.training.records.timeline import Timeline
from isles.training.staged import (
    Staged,
    build_stage,
    hold_against_whole,
    planned_cut,
    recovery_of,
    run_scheme,
    told_by_first,
)
from isles.training.step import WAITS, Step, Whole
from isles.training.step_clock import StepClock
from isles.training.text import Text


class Trainer:
    """One worker of a run. corpus: that of `config.data`, where it was loaded already. roster: of the replicas, where
    they come and go.
    """

    def __init__(self, config: Config, world: Mesh, corpus: Corpus | None = None, roster: Roster | None = None) -> None:
        self.config, self.world, self.workers = config, world, world.size
        routing = config.pipeline.routing  # some nodes learn more than others, as more comes by them
        uneven = routing == "skippipe" or (routing == "swarm" and config.method != "none")
        world.world.ledger.trust.ratio = config.world.trust_ratio * (JUMPS if uneven else 1.0)
        self.text = self._text(corpus) if world.place.stage == 0 else None
        self.judges = self._judging()
        """Whether text was kept for validation, known to all who judge."""
        cut = planned_cut(config) if config.pipeline.stages > 1 else None
        scheme = None if cut is None else run_scheme(config, cut)
        self.memory = PlannedMemory(config, take_device(config.model, world.local_rank), world.place.stage)
        take_cores(config, self.memory.computes)
        model = self._whole_model() if cut is None or scheme is None else self._stage(cut, scheme)
        self.optimizer, notices = self._wrapped(model, roster, self.memory.manage)
        self.model = self.optimizer.model
        if weighs_samples(config):
            notices += self._weigh()
        self.device = self.memory.device(self.model)
        self.schedule = rate_schedule(self.optimizer, config)
        line = world.transport.line()
        expected = [] if line is None else [expectation(self.optimizer, config, line)]
        for notice in [*notices, *self.memory.notices, *expected]:
            if world.rank == 0:
                world.report({"notice": notice})
        fp16 = config.model.autocast == "fp16"
        self.scaler = torch.amp.GradScaler(self.device.type) if fp16 else None
        self.autocast = partial(autocast, config.model, self.device)
        self.model_step: Step = (
            Whole(self.optimizer, self.model, self.autocast, self.scaler, batches=config.inner.accumulation)
            if cut is None or scheme is None
            else self._staged(cut, scheme)
        )
        self.recovery = None if cut is None else recovery_of(config, world, cut, cast(Stage, self.model))
        self.tokens = 0
        self.clock_before = 0.0
        self.started = time.perf_counter()
        self.losses: list[Tensor] = []
        speaks = world.inner.rank == 0  # for those that hold the same
        compared = world.outer.size > 1 and speaks and self.optimizer.shares
        self.sample = Sample(self.optimizer.shares) if compared else None
        self.timeline = Timeline(world.rank)
        self.step_clock = StepClock(world.transport, self.device, simulated=config.world.is_simulated)
        for channel in WAITS:  # the clock of steps begins now, and what the start has waited for is in none of them
            world.world.traffic[channel].blocked_seconds = 0.0

    def _text(self, corpus: Corpus | None) -> Text:
        """What a worker of the first stage reads."""
        return Text(self.config, self.world, corpus)

    def _judging(self) -> bool:
        """With a plan the first column judges for all."""
        judges = told_by_first(self.world.stage, self.text is not None and self.text.judges)
        return judges and (self.config.pipeline.routing != "skippipe" or self.world.place.replica == 0)

    def _wrapped(
        self, model: nn.Module, roster: Roster | None, manage: Callable[[nn.Module, Optimizer], Optimizer]
    ) -> tuple[ReplicaSync, list[str]]:
        """The optimizer of the run, or a refusal; and what is to be said of it."""
        world = self.world
        return wrapped(
            self.config, model, roster or world.outer, world.inner, world.stage, manage, everyone=world.world
        )

    def _staged(self, cut: Cut, scheme: Scheme) -> Step:
        """How this worker runs its stage."""
        return Staged(self.config, self.world, cut, scheme, self.optimizer, self.autocast, self.memory.announce)

    def _weigh(self) -> list[str]:
        """Tell the others how much text this worker has."""
        assert isinstance(self.optimizer, OuterSync) and self.text is not None
        loader = self.text.loader
        self.optimizer.weigh(loader.sequences)
        told = 'weights = "samples": all workers have equal shares of the text with data.split = "iid"'
        return [] if loader.split == "by_file" else [told]

    def _whole_model(self) -> nn.Module:
        """The model of the run."""
        config = self.config
        model = build(config.model, config.run.seed, self.world.local_rank, self.memory.home)
        if config.model.factory is not None:
            check_contract(model, config.model.factory, limits(config.model).context)
        if config.run.start:
            start_weights(model, config.run.start)
        return model

    def _stage(self, cut: Cut, scheme: Scheme) -> Stage:
        """This worker's piece of it. The first worker holds all pieces against the whole before anybody trains."""
        world = self.world
        if world.rank == 0 and (notice := hold_against_whole(self.config, cut)) is not None:
            world.report({"notice": notice})
        return build_stage(self.config, cut, scheme, world.place.stage, world.local_rank, self.memory.home)

    def run(self, out: Path | None) -> dict[str, Any] | None:
        """Train the steps that are left; rank 0 writes OUT/model.safetensors. Returns this worker's share of the
        summary, or None where the run was stopped (its state is then in a checkpoint).
        """
        run = self.config.run
        for step in range(self.optimizer.steps + 1, run.steps + 1):
            self.step()
            validating = self.judges and run.validate_every and step % run.validate_every == 0 and step < run.steps
            if validating or step % run.log_every == 0 or step == run.steps:
                self.report(self.validate() if validating else None)
            stopping = self.world.stop_here(step) and step < run.steps
            if out is not None and (stopping or (self._saves_after(step) and step < run.steps)):
                self._refuse_not_finite(step, self.losses)
                self._save(out, step)
            if stopping:
                self._report_last_spans()
                return None
        return self.conclude(out)

    def _saves_after(self, step: int) -> bool:
        every = self.config.run.checkpoint_every
        return bool(every) and step % every == 0

    def _save(self, out: Path, step: int) -> None:
        """This worker's part of the checkpoint of `step`."""
        state = self.state_dict()
        self._refuse_broken(step, state)
        Checkpoints(out).write_shard(step, self.world.rank, state, run_name(self.config))
        self.world.report({"checkpoint": step, "worker": self.world.rank})

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next steps of this worker depend on, and its running totals: live tensors, no copies."""
        with self.step_clock.step():
            optimizer = self.optimizer.live_state()  # first: it waits for what is under way
        self.step_clock.read()
        return {
            "optimizer": optimizer,
            "model": self.optimizer.weights(),
            "schedule": self.schedule.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "recovery": None if self.recovery is None else self.recovery.state_dict(),
            "step": self.model_step.state_dict(),
            "loader": None if self.text is None else self.text.state_dict(),
            "tokens": self.tokens,
            "losses": torch.stack(self.losses) if self.losses else None,
            "training_seconds": self.step_clock.seconds,
            "clock_seconds": self.clock(),
            "host_seconds": time.perf_counter() - self.started,
            **draws_state(self.device),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly from `state_dict`."""
        try:
            self.optimizer.load_weights(state["model"])
        except RuntimeError as error:  # torch tells every tensor that does not fit, a line each
            raise ValueError(
                "the checkpoint is of another model: set [model] in the run's config.toml back to what it was"
            ) from error
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.roster.load_state_dict({})  # every seat of a resumed run has a worker again
        self.schedule.load_state_dict(state["schedule"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        if self.recovery is not None:
            self.recovery.load_state_dict(state["recovery"])
        self.model_step.load_state_dict(state["step"])
        if self.text is not None:
            self.text.load_state_dict(state["loader"])
        self.tokens = state["tokens"]
        self.losses = [] if state["losses"] is None else list(state["losses"].to(self.device))
        self.step_clock.seconds = state["training_seconds"]
        self.clock_before = state["clock_seconds"] - self.world.transport.now()
        self.timeline = Timeline(self.world.rank, resumed=True)
        self.started = time.perf_counter() - state["host_seconds"]
        restore_draws(state, self.device)

    def clock(self) -> float:
        """Seconds of the run, those before it was resumed included."""
        return self.clock_before + self.world.transport.now()

    def step(self) -> None:
        """One inner step: `accumulation` batches, the optimizer, the schedule."""
        with self.step_clock.step(self.timeline):
            self._step()

    def _step(self) -> None:
        with self.memory.metered():
            loss = self.model_step.run(self._batches() if self.model_step.reads else ())
        losses = [] if loss is None else [loss]
        if self.device.type == "cpu":  # elsewhere a look would wait for the device: `metrics` looks there
            self._refuse_not_finite(self.optimizer.steps + 1, losses)  # before anyone is sent what came of it
        self.optimizer.step(scaler=self.scaler)
        if self.recovery is not None:
            self._mend(self.recovery)
        self.optimizer.zero_grad()
        self.schedule.step()
        self.losses += losses

    def _mend(self, recovery: Recovery) -> None:
        """Lose and mend stages, where that is asked for."""
        lost, factor = recovery.after_step(self.optimizer.steps, self.optimizer.inner)
        self.optimizer.take_in()
        self.schedule.base_lrs = [rate * factor for rate in self.schedule.base_lrs]
        if self.world.rank == 0:
            for stage in lost:
                told = f'stage {stage} was lost after inner step {self.optimizer.steps}, mended by "{recovery.kind}"'
                self.world.report({"notice": told})

    def _refuse_not_finite(self, last: int, losses: Sequence[Tensor]) -> None:
        refuse_losses(self.config, self.world.rank, last, losses)

    def _refuse_broken(self, step: int, state: Mapping[str, Any]) -> None:
        refuse_state(self.config, self.world.rank, step, state, {name for name, _ in self.model.named_parameters()})

    def _batches(self) -> Iterator[Tensor]:
        """Those of one inner step, each read when it is asked for; none where this worker does not read."""
        if self.text is None:
            return
        for _ in range(self.config.inner.accumulation):
            (tokens,) = to_device([self.text.batch()], self.device)
            self.tokens += tokens[:, 1:].numel()
            yield tokens

    def validate(self) -> float | None:
        """Validation loss of this worker's evaluation weights, nats per token; None without validation text."""
        with self.optimizer.evaluation_weights():
            return self._judge()

    def report(self, val_loss: float | None) -> None:
        """Tell the launcher how far this worker is."""
        step, rank = self.optimizer.steps, self.world.rank
        self.world.report(asdict(self.metrics(val_loss)) | self._gauges())
        if self.sample is not None:
            self.optimizer.catch_up()
            sample = {"sample": self.sample.read(), "weights": self.sample.weights}
            self.world.report(sample | {"step": step, "worker": rank})
        self._report_spans(self.timeline.take(step, self.world.world.traffic.take_spans(), self.clock_before))

    def _gauges(self) -> dict[str, float]:
        return self.optimizer.gauges()

    def _report_spans(self, spans: list[dict[str, Any]]) -> None:
        if spans:
            self.world.report({"spans": spans})

    def _report_last_spans(self) -> None:
        tasks = self.timeline.tasks(self.optimizer.steps, self.model_step.played, self.clock_before)
        self._report_spans(self.timeline.rest())
        self._report_spans(tasks)

    def metrics(self, val_loss: float | None) -> Metrics:
        """The line for the steps since the last one."""
        self._refuse_not_finite(self.optimizer.steps, self.losses)
        loss = float(torch.stack(self.losses).mean()) if self.losses else math.nan
        self.losses.clear()
        self.step_clock.read()
        traffic = self.world.world.traffic
        blocked = traffic.total("blocked_seconds", *WAITS)
        return Metrics(
            step=self.optimizer.steps,
            worker=self.world.rank,
            loss=loss,
            lr=lr_factor(self.optimizer.steps, self.config.run.steps, self.config.inner) * self.config.inner.lr,
            tokens=self.tokens,
            bytes_sent=int(traffic.total("bytes_sent")),
            bytes_received=int(traffic.total("bytes_received")),
            blocked_seconds=blocked,
            compute_seconds=self.step_clock.seconds - blocked,
            clock_seconds=self.clock(),
            val_loss=val_loss,
            **self.step_clock.usage(None if self.config.pipeline.stages > 1 else self.model, self.tokens),
        )

    def conclude(self, out: Path | None) -> dict[str, Any]:
        """Finish, judge replicas and the consolidated model, save it."""
        traffic, workers = self.world.world.traffic, self.workers
        self.step_clock.read()
        computing = self.step_clock.seconds - traffic.total("blocked_seconds", *WAITS)
        self.optimizer.land_all()  # all do as many steps; `whole` proves that they end as one
        self._refuse_broken(self.optimizer.steps, {"model": self.optimizer.weights()})
        self.step_clock.read()
        self.timeline.take(self.optimizer.steps, traffic.take_spans(), self.clock_before)
        self._report_last_spans()
        sent, received = int(traffic.total("bytes_sent")), int(traffic.total("bytes_received"))
        channels = traffic.by_channel()
        blocked = traffic.total("blocked_seconds", *WAITS)
        clock, seconds = self.clock(), time.perf_counter() - self.started
        replica_loss, spread = self._judge(), self.optimizer.replica_std()
        model = self.model_step.whole(self.optimizer)
        final = model if self.optimizer.together(lambda group: self._save_first(group, model, out)) else None
        parameters = 0 if model is None else sum(parameter.numel() for parameter in model.parameters())
        dtype = self.optimizer.parameters[0].dtype
        ddp = [sent_bytes(parameters, dtype, codec("none"), workers, position) for position in range(workers)]
        return {
            "tokens": self.tokens,
            "parameters": parameters,
            "val_loss": None if final is None else self._judge_whole(final),
            "val_loss_replica": replica_loss,
            "replica_std": spread,
            "bytes_sent": sent,
            "bytes_received": received,
            "ddp_bytes": self.config.run.steps * sum(ddp) / len(ddp),
            "compute_seconds": computing,
            "blocked_seconds": blocked,
            "train_seconds": seconds,
            "virtual_seconds": clock,
            "channels": channels,
            "corpus_sha256": "" if self.text is None else self.text.corpus.sha256,
            "memory": self.memory.told(computing / self.config.run.steps),
        }

    def _save_first(self, group: Group, model: nn.Module | None, out: Path | None) -> bool:
        """Write the model, as the first of those who are left; whether this worker is that one."""
        if group.rank != 0 or self.world.inner.rank != 0:
            return False
        if model is not None:
            self._refuse_broken(self.optimizer.steps, {"model": model.state_dict()})
            if out is not None:
                save_model(model, out / "model.safetensors")
        return True

    def _judge(self) -> float | None:
        """Of the weights of now."""
        if not self.judges:
            return None
        text = self.text if self.model_step.reads else None
        return self.model_step.judge(() if text is None else text.validation())

    def _judge_whole(self, model: nn.Module) -> float | None:
        """Of a model that this worker holds by itself."""
        if self.text is None or not self.judges:
            return None
        return validation_loss(model, self.text.validation(), self.autocast())
