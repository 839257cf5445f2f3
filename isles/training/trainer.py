"""One worker's training run, the same code on every backend.

loader -> forward, backward -> optimizer.step() (reduce, clip, inner step, exchange) -> schedule
every log_every steps: a line of metrics.jsonl goes to the launcher, and a sample of the weights (see `replica_spread`)
at the end: finish, evaluate the replicas, consolidate, evaluate the one model, save it
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from isles.base.modes import to_device
from isles.comm.group import Group
from isles.comm.mesh import Mesh
from isles.network.routing.events import Span
from isles.replicas.sync import ReplicaSync
from isles.training.config.sections import Config
from isles.training.loop import TrainingLoop, load_schedule, rate_schedule
from isles.training.records.replica_spread import Sample
from isles.training.records.shard import save_model
from isles.training.step import WAITS, Losses, TrainerParts, model_losses, validation_losses


class Trainer(TrainingLoop):
    """One worker of a run. parts: model, optimizer, text and more; see `isles.training.worker`."""

    def __init__(self, config: Config, world: Mesh, parts: TrainerParts) -> None:
        self.text, self.validates, self.optimizer, self.workers = (
            parts.text,
            parts.validates,
            parts.optimizer,
            world.size,
        )
        self.memory, self.model_step, self.recovery = parts.memory, parts.runner, parts.recovery
        self.scaler, self.autocast = parts.scaler, parts.autocast
        self.model = self.optimizer.model
        self.schedule = rate_schedule(self.optimizer, config)
        for notice in parts.notices:
            if world.rank == 0:
                world.report({"notice": notice})
        whole = None if config.pipeline.stages > 1 else self.model
        super().__init__(config, world, parts.name, self.memory.device(self.model), whole)
        is_first = world.inner.rank == 0  # one worker of each island samples, as all have the same weights
        compared = world.outer.size > 1 and is_first and self.optimizer.shares
        self.sample = Sample(self.optimizer.shares) if compared else None
        for channel in WAITS:  # waits before the first step do not count
            world.world.traffic[channel].blocked_seconds = 0.0

    @override
    def steps_done(self) -> int:
        return self.optimizer.steps

    @override
    def played(self) -> Sequence[Span]:
        return self.model_step.played

    @override
    def state_dict(self) -> dict[str, Any]:
        with self.step_clock.step():
            optimizer = self.optimizer.live_state()  # first, as it waits for exchanges in flight, which change the rest
        return {
            "optimizer": optimizer,
            "model": self.optimizer.weights(),
            "schedule": self.schedule.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "recovery": None if self.recovery is None else self.recovery.state_dict(),
            "step": self.model_step.state_dict(),
            "loader": None if self.text is None else self.text.state_dict(),
            "tokens": self.tokens,
            **self.records(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        try:
            self.optimizer.load_weights(state["model"])
        except RuntimeError as error:  # torch's message has a line for every tensor that does not fit
            raise ValueError(
                "the checkpoint is of another model: set [model] in the run's config.toml back to what it was"
            ) from error
        inner = state["optimizer"]["inner"]
        saved, own = inner.get("inner", inner).get("param_groups", ()), self.optimizer.param_groups
        if saved and [group.keys() for group in saved] != [group.keys() for group in own]:
            raise ValueError(
                "the checkpoint is of another inner optimizer: set inner.optimizer in config.toml back to what it was"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.roster.load_state_dict({})  # every rank of a resumed run has a worker again
        load_schedule(self.schedule, state["schedule"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        if self.recovery is not None:
            self.recovery.load_state_dict(state["recovery"])
        self.model_step.load_state_dict(state["step"])
        if self.text is not None:
            self.text.load_state_dict(state["loader"])
        self.tokens = state["tokens"]
        self.load_records(state)

    @override
    def step(self) -> None:
        """One inner step: `accumulation` batches, the optimizer, the schedule."""
        with self.step_clock.step(self.timeline):
            self._step()

    def _step(self) -> None:
        with self.memory.metered():
            loss = self.model_step.run(self._batches() if self.model_step.reads else ())
        losses = [] if loss is None else [loss]
        if self.device.type == "cpu":  # on a GPU the check would wait for the device: there `metrics` does it
            self._refuse_not_finite(self.optimizer.steps + 1, losses)  # before the gradients are sent to others
        self.optimizer.step(scaler=self.scaler)
        self._recover()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.losses += losses

    def _recover(self) -> None:
        recovery = self.recovery
        if recovery is None:
            return
        lost, factor = recovery.after_step(self.optimizer.steps, self.optimizer.inner)
        self.optimizer.take_in()
        self.schedule.base_lrs = [rate * factor for rate in self.schedule.base_lrs]
        if self.world.rank == 0:
            for stage in lost:
                how = f'restored by "{recovery.settings.kind}"'
                text = f"stage {stage} was lost after inner step {self.optimizer.steps}, {how}"
                self.world.report({"notice": text})

    @override
    def _finite(self) -> Container[str]:
        return {name for name, _ in self.model.named_parameters()}

    def _batches(self) -> Iterator[Tensor]:
        """The batches of one inner step, each read on demand; none if this worker does not read."""
        if self.text is None:
            return
        for _ in range(self.config.inner.accumulation):
            (tokens,) = to_device([self.text.batch()], self.device)
            self.tokens += tokens[:, 1:].numel()
            yield tokens

    @override
    def validate(self) -> Losses:
        with self.optimizer.evaluation_weights():
            return self._evaluate()

    @override
    def report(self, losses: Losses) -> None:
        super().report(losses)
        if self.sample is not None:
            self.optimizer.catch_up()
            sample = {"sample": self.sample.read(), "weights": self.sample.weights}
            self.world.report(sample | {"step": self.steps_done(), "worker": self.world.rank})

    @override
    def gradient_norm(self) -> Tensor | None:
        inside = self.optimizer.inner  # of an island, if it has one: there the gradient is clipped
        return (inside if isinstance(inside, ReplicaSync) else self.optimizer).gradient_norm

    @override
    def _gauges(self) -> dict[str, float]:
        return self.optimizer.gauges()

    @override
    def conclude(self, out: Path | None) -> dict[str, Any]:
        self.step_clock.read()
        computing = self.step_clock.seconds - self.world.world.traffic.total("blocked_seconds", *WAITS)
        self.optimizer.land_all()  # complete all exchanges; `whole` then checks that the replicas agree
        self.refuse_broken(self.optimizer.steps, {"model": self.optimizer.weights()})
        totals = self.totals()
        replica_loss, spread = self._evaluate().get("val_loss"), self.optimizer.replica_std()
        model = self.model_step.whole(self.optimizer)
        final = model if self.optimizer.together(lambda group: self._save_first(group, model, out)) else None
        text, losses = self.text if self.validates else None, Losses()
        if final is not None and text is not None:
            losses = model_losses(final, text, self.autocast)
        parameters = 0 if model is None else sum(parameter.numel() for parameter in model.parameters())
        return {
            **totals,
            **self.compared(parameters, self.optimizer.parameters[0].dtype, self.workers, self.text),
            "tokens": self.tokens,
            "parameters": parameters,
            "val_loss": None,
            **losses,
            "val_loss_replica": replica_loss,
            "replica_std": spread,
            "compute_seconds": computing,
            "memory": self.memory.record(computing / self.config.run.steps),
        }

    def _save_first(self, group: Group, model: nn.Module | None, out: Path | None) -> bool:
        """Write the model if this worker is the first remaining one; returns whether it is."""
        if group.rank != 0 or self.world.inner.rank != 0:
            return False
        if model is not None:
            self.refuse_broken(self.optimizer.steps, {"model": model.state_dict()})
            if out is not None:
                save_model(model, out / "model.safetensors")
        return True

    def _evaluate(self) -> Losses:
        if not self.validates:
            return {}
        step = self.model_step
        return validation_losses(self.config.data, lambda: self.text if step.reads else None, step.evaluate)
