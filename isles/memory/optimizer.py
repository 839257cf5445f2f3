"""The optimizer of a run under a plan: wraps the model's own one, and keeps each unit's weights and states in their
tier.

    managed = Managed(plan, model, inner, profile=..., machine=...)
    for batch in batches:
        model(batch).loss.backward()
        managed.gradients()                      # all gradients are on their parameters: before clipping
        clip_grad_norm_(model.parameters(), 1.0)
        managed.step()                           # updates of the device's units; those of the host begin
        managed.zero_grad()
    managed.catch_up()                           # all updates are done: before weights or states are read

A `ReplicaSync` around it calls `gradients` and `catch_up` where they are due (`isles.base.wrapping`). Losses, weights
and optimizer states are the same to the bit. Only the time and place of the bytes differ.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isles.base.wrapping import SpreadShares, Wrapping, evaluated
from isles.memory.costs import Profile
from isles.memory.disk import stored_units
from isles.memory.engines.base import Engine
from isles.memory.engines.cuda import usual_engine
from isles.memory.flow import PassKind, UpdateWork
from isles.memory.meter import MemoryMeter
from isles.memory.parameters import (
    Arrivals,
    Gathering,
    PartialOptimizer,
    Settings,
    SharedPart,
    portions_of,
    refuse_shares,
    same_settings,
    settings_of,
)
from isles.memory.plan import MemoryPlan
from isles.memory.runner import Runner
from isles.memory.units import units_of
from isles.network.machines import Machine


class Managed(Wrapping):
    """`inner`, which updates all parameters of `model`, under a plan.

    Losses, weights and optimizer states are, bit for bit, those of `inner` without a plan. `param_groups` and `state`
    are those of `inner`. Its threads end with `close`, or at the end of a `with` block.

    device: that the model computes on; None: its current one. engine: None: one with its own threads. disk: the folder
    for the tensors that the plan puts on disk. runner: wraps the units' passes. rest: the parameters that the device
    updates. meter: counts the bytes that other threads and this object put on the device; `with meter:` around forward
    and backward passes counts the others.

    PlanMismatch if model or batch differ from the plan's; ValueError if the folder cannot be used.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        model: nn.Module,
        inner: Optimizer,
        *,
        profile: Profile,
        machine: Machine,
        device: torch.device | None = None,
        engine: Engine | None = None,
        disk: str = "",
        meter: MemoryMeter | None = None,
    ) -> None:
        plan.check(profile)
        device = next(model.parameters()).device if device is None else device
        engine = usual_engine(device) if engine is None else engine
        super().__init__(inner, [parameter for parameter in model.parameters() if parameter.requires_grad])
        self.plan, self.model, self.device, self.engine = plan, model, device, engine
        units = units_of(model)
        on_host = [unit.parameters for unit, one in zip(units, plan.placements, strict=True) if one.tier != "device"]
        engine.moves.offload(hosted := {id(parameter) for own in on_host for parameter in own}, model)
        stored = stored_units(units, plan.placements, inner, [unit.states for unit in profile.units], disk, meter)
        landing = Arrivals(self._arrived)
        self.runner = Runner(plan, model, profile, machine, engine, device, landing, stored, meter)
        self._parts: dict[int, PartialOptimizer | SharedPart] = {
            index: PartialOptimizer(inner, device_copy.host) for index, device_copy in self.runner.device_copy.items()
        }
        self.rest = [parameter for parameter in self.parameters if id(parameter) not in hosted]
        self._rest_part = PartialOptimizer(inner, self.rest)
        self.meter = meter
        if meter is not None:
            meter.track(*model.buffers(), *self.rest)
        self._begun: tuple[Settings, set[int]] | None = None  # updates of the step that began before it
        self._waits_for_ready, self._final = False, set[int]()  # parameters whose gradients are final, by id
        self._clean = True  # gradients of the last step are gone
        self._hooks = _read_hooks(model, weakref.ref(self))
        self._finalizer = weakref.finalize(self, engine.close)

    # The step

    def gradients(self) -> None:
        """Wait until all gradients of the passes so far are on their parameters."""
        self.runner.gradients()

    @property
    def early(self) -> bool:
        """Whether units may be updated before `step`."""
        return self.plan.update == "early"

    def portions(self, size: int) -> list[list[int]]:
        """Bytes of each worker's share of the units on the host; empty if the plan has no shares. ValueError if it is
        for another number of workers.
        """
        if self.plan.shared not in (1, size):
            raise ValueError(f"memory.plan shares states among {self.plan.shared} workers, and there are {size}")
        return portions_of([one.host for one in self.runner.device_copy.values()], size) if self.plan.shared > 1 else []

    def share(self, position: int, size: int, spread: SpreadShares) -> None:
        """Keep and update only the states of one share of every unit on the host. ValueError if they are on disk."""
        if self.runner.stored:
            raise ValueError("memory.shard: states on disk are not shared: leave memory.disk out, or memory.shard")
        for index, part in self._parts.items():
            assert isinstance(part, PartialOptimizer)
            self._parts[index] = SharedPart(part, part.parameters, position, size)
        self.runner.gathering = Gathering(self.engine, [unit.name for unit in self.runner.units], spread)

    def announce(self, halves: Sequence[tuple[PassKind, object]]) -> None:
        """Set the order of the next step's forward and backward passes, with a key of each pass, if several are in
        flight at a time: the next weights are then prefetched, or stay if they are needed again.
        """
        self.runner.passes.announce(halves)

    def hold(self) -> None:
        """Wait for `ready` before gradients count as final, as a method exchanges them."""
        self._waits_for_ready = True

    def ready(self, parameters: Sequence[nn.Parameter]) -> None:
        """`parameters` have their final gradients: start the updates of units on the host that have all of theirs, in
        the order of the next forward pass.
        """
        self._final.update(map(id, parameters))
        for unit, device_copy in self.runner.device_copy.items():
            trained = [id(parameter) for parameter in device_copy.host if parameter.requires_grad]
            if self._final.issuperset(trained) and not (self._begun and unit in self._begun[1]):
                self._begin_update(unit)

    def _arrived(self, unit: int) -> None:
        """All gradients of a unit in this step are there; with early updates its update begins."""
        if self.early and not self._waits_for_ready:
            self._begin_update(unit)

    @torch.no_grad()
    def _begin_update(self, unit: int) -> None:
        if self._begun is None:
            self._begun = settings_of(self.inner), set()
        self._begun[1].add(unit)
        self._queue(unit, self._begun[0])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the device's units, and start the updates of the host's, first units first. RuntimeError if early
        updates were made with other settings.
        """
        loss = evaluated(closure)
        self.gradients()
        self.runner.finish_pass(whole=True)
        self.inner._opt_called = True  # type: ignore[attr-defined]  # as its own step would: torch's schedules ask
        settings, done = settings_of(self.inner), set[int]()
        if self._begun is not None:
            began_with, done = self._begun
            if not same_settings(began_with, settings):
                raise RuntimeError(
                    'memory.update = "early": a setting of the optimizer, such as its learning rate, was changed '
                    'between the backward pass and step(); change it before the forward pass, or use "exact"'
                )
        self._begun, self._final = None, set()
        began = time.perf_counter()
        in_order = reversed(self._parts) if self.engine.first_come else self._parts  # as gradients came, or as needed
        for index in in_order:
            if index not in done:
                self._queue(index, settings)
        self._rest_part.step(settings)
        if self.meter is not None:
            states = (value for parameter in self.rest for value in self.inner.state.get(parameter, {}).values())
            self.meter.track(*(value for value in states if isinstance(value, Tensor)))
        self.engine.computed(began, self.runner.flow.update_seconds)
        self.runner.end_step()
        self._clean = not any(parameter.grad is not None for parameter in self.rest)
        return loss

    def _queue(self, index: int, settings: Settings) -> None:
        """Start the update of a unit on the host by its current gradients; its device copy is refreshed afterwards."""
        runner, part = self.runner, self._parts[index]
        host = runner.device_copy[index].host
        gradients = [parameter.grad for parameter in host]
        for parameter in host:  # theirs from here on: whoever calls zero_grad() does not reach them
            parameter.grad = None
        stored = runner.stored.get(index)

        def make() -> UpdateWork:
            update = None if stored is None else stored.update()

            def step() -> None:
                (part.update if update is None else update.step)(settings, gradients)
                gradients.clear()

            return UpdateWork(step) if update is None else UpdateWork(step, update.load, update.save)

        runner.flow.expect(index)
        urgency = (runner.steps + 1, 0, 0, index)
        if isinstance(part, SharedPart):
            runner.gathering.expect(index)
            after = partial(runner.gathering.begin, index, part.rows)
            runner.flow.update(index, urgency, make, stored=False, after=after)
        else:
            runner.flow.update(index, urgency, make, stored=stored is not None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the device's units, and detach those that pending updates on the host still need.
        Before `step`, drop the gradients of the passes since the last one. RuntimeError if early updates have used
        these.
        """
        if self.runner.batches:
            if self._begun is not None:
                raise RuntimeError(
                    'memory.update = "early": updates by these gradients have begun, so they cannot be thrown away: '
                    'call step() first, or use "exact"'
                )
            self.gradients()
            self.runner.discard()
            for device_copy in self.runner.device_copy.values():
                for parameter in device_copy.host:
                    parameter.grad = None
        for parameter in self.rest:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def catch_up(self) -> None:
        """Wait until all updates that `step` began are done: before anything reads or writes weights or states."""
        for index in self._parts:
            self.runner.weights_of(index)
            self.runner.flow.written[index].wait(f"the states of {self.runner.units[index].name} on disk")
        self.engine.check()

    # State

    @Wrapping.state.getter
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's state (the same object), after all updates."""
        if hasattr(self, "_parts"):
            self.catch_up()
        return self.inner.state

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's; independent of the plan, so a run can resume under another plan, or without one."""
        self.catch_up()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.catch_up()
        self.inner.load_state_dict(state_dict)
        for part in self._parts.values():
            if isinstance(part, SharedPart):
                part.keep_own()
            else:
                refuse_shares(self.inner, part.parameters)
        for stored in self.runner.stored.values():
            stored.keep_states()

    # The end

    def close(self) -> None:
        """Complete updates, end all threads, and restore the model's own forward. After a failure without waiting."""
        try:
            if self.engine.failed is None and self._finalizer.alive:
                self.catch_up()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """As `close`, but drop updates that have not begun, and do not wait for other workers: after an error, when
        nothing in flight will be used. Weights may then be of two steps.
        """
        self._finalizer()
        self.runner.detach()
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> Managed:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close() if error is None else self.abandon()


def _read_hooks(model: nn.Module, managed: weakref.ref[Managed]) -> list[Any]:
    """Whoever reads or loads the model's weights past the optimizer waits for the updates, too."""

    def wait(*_: Any) -> None:
        there = managed()
        if there is not None and there.engine.failed is None:
            there.catch_up()

    hooks = list[Any]()
    for module in model.modules():
        hooks.append(module.register_state_dict_pre_hook(partial(wait)))
        hooks.append(module.register_load_state_dict_pre_hook(partial(wait)))
    return hooks
