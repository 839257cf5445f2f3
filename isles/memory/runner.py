"""Forward and backward passes under a plan: fetches blocks' weights to the device, swaps or recomputes activations, and
sends gradients to the host, in the order and the amounts of `isles.memory.flow`.

A unit's backward pass begins at the edge after it and ends at the edge before it (`units.edge`). A pass that does not
go through all units in order, forward and then backward, is an error of one line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from isles.base.wrapping import host_work
from isles.memory.activations import Repeatable, Swapped
from isles.memory.costs import Profile
from isles.memory.disk import StoredUnit
from isles.memory.engines.base import Engine
from isles.memory.events import EngineLane, LaneAction, LaneEvent, Urgency
from isles.memory.flow import Half, PassesInFlight, PassTask, StepFlow, not_followed, nothing, out_of_order
from isles.memory.meter import MemoryMeter
from isles.memory.parameters import Arrivals, DeviceCopy, Gathering, Landed
from isles.memory.plan import MemoryPlan
from isles.memory.units import edge, tensors_in, units_of
from isles.network.machines import Machine


class Runner:
    """Wraps the units of `model` under `plan`.

    device: that the model computes on. landing: gradients in transit to the host. stored: by unit, its part on disk.

    flow: bytes and lanes. batches: passes since the last step; steps: number of steps.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        model: nn.Module,
        profile: Profile,
        machine: Machine,
        engine: Engine,
        device: torch.device,
        landing: Arrivals,
        stored: Mapping[int, StoredUnit],
        meter: MemoryMeter | None = None,
    ) -> None:
        self.units, self.plan, self.engine, self.device = units_of(model), plan, engine, device
        flow = self.flow = StepFlow(profile, plan.placements, machine, engine, self.submit, budget=plan.peak)
        self.buffers, self.meter, self.landing, self.stored = list(model.buffers()), meter, landing, stored
        self.device_copy = flow.device_copy = {
            index: DeviceCopy(
                unit,
                device,
                profile.autocast,
                stays=not flow.costs[index].slot,
                fetch=stored[index].fetch if flow.costs[index].filed else None,
                meter=meter,
                moves=engine.moves,
            )
            for index, unit in enumerate(self.units)
            if not flow.costs[index].on_device
        }
        self._began = 0.0
        self.passes = PassesInFlight(len(self.units), profile.in_flight)
        self.batches = self._backs = self.steps = 0  # passes, and backward passes, since the last step; steps
        self._needs: dict[tuple[int, PassTask], list[LaneEvent]] = {}
        self._order: dict[Half, int] = {}  # the order in which halves were requested
        self.gathering = Gathering(engine)  # of weights that several workers update in shares
        self._bottom = 0  # bytes of the transients of the task "bottom", freed at the end of the pass
        for index, unit in enumerate(self.units):
            unit.module.forward = partial(self._run, index, unit.module.forward)  # type: ignore[method-assign]

    @property
    def moved(self) -> dict[str, int]:
        """Bytes so far, by lane."""
        every = self.stored.values()
        return self.flow.counted.moved | {
            "read": sum(one.read for one in every),
            "write": sum(one.written for one in every),
        }

    def detach(self) -> None:
        """Restore the units' own forward."""
        for unit in self.units:
            unit.module.__dict__.pop("forward", None)
        for device_copy in self.device_copy.values():
            device_copy.show(False)

    # One unit

    def _run(self, index: int, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._without_gradients(index, forward, args, named)
        number = self._begin_pass() if index == 0 else self.passes.begun
        self._begin(PassTask("forward", index), number)
        device_copy, activations, swapped = self.device_copy.get(index), self.plan.placements[index].activations, None
        if device_copy is not None and device_copy.stays and device_copy.stale:
            device_copy.refresh()
        shared = [tensor for tensor in tensors_in((args, named)) if not tensor.requires_grad]
        args, named = edge(partial(self._backward_ends, index, number), (args, named), always=True)
        if activations == "recompute":
            made = checkpoint(Repeatable(self.units[index].module, forward), *args, use_reentrant=False, **named)
        elif activations == "swap":
            own = self.units[index].parameters if device_copy is None else device_copy.device
            swapped = Swapped([*own, *self.buffers, *shared], self.device, self.meter, self.engine.moves)
            with torch.autograd.graph.saved_tensors_hooks(swapped.pack, swapped.unpack):
                made = forward(*args, **named)
        else:
            made = forward(*args, **named)
        del args, named, shared
        made = edge(partial(self._begin, PassTask("backward", index), number), made)
        self._forward_ends(index, number, swapped)
        return made

    def _without_gradients(self, index: int, forward: Callable[..., Any], args: Any, named: Any) -> Any:
        """Run a unit under `torch.no_grad`: fetches its weights for this call, saves nothing."""
        device_copy = self.device_copy.get(index)
        if device_copy is None:
            return forward(*args, **named)
        self.weights_of(index)
        if not device_copy.stays:
            device_copy.fill()
        elif device_copy.stale:
            device_copy.refresh()
        device_copy.show(True)
        try:
            return forward(*args, **named)
        finally:
            device_copy.show(False)
            if not device_copy.stays:
                device_copy.empty()

    def weights_of(self, index: int) -> None:
        """Wait until the unit's last update is in its weights on the host, and in a copy that stays on the device."""
        self.gathering.need(index)
        self.flow.updated[index].wait(f"the update of {self.units[index].name}")
        self.flow.refreshed[index].wait(f"the weights of {self.units[index].name}")

    # A pass

    def _begin_pass(self) -> int:
        self.finish_pass()
        if len(self.passes.left) >= self.passes.in_flight:
            self.finish_pass(whole=True)
        self.engine.check()
        self.batches += 1
        number = self.passes.begin()
        self._begin_half(Half(number, "forward"))
        return number

    def _begin_half(self, begun: Half) -> None:
        for half in self.passes.to_ask(begun):
            self._order[half] = len(self._order)
            needs = self.flow.ask(half, lambda task, half=half: self._urgency(half, task.unit))
            self._needs |= {(half.number, task): events for task, events in needs.items()}

    def finish_pass(self, *, whole: bool = False) -> None:
        """Check that the current pass is over (`whole`: that all are). RuntimeError if a backward pass has not run."""
        task = self.passes.open(whole=whole)
        if task is not None:
            raise not_followed(task, self.units[task.unit].name)
        self._free_bottom()

    def _free_bottom(self) -> None:
        if self._bottom:
            self.flow.arena.free(self._bottom)
            self._bottom = 0

    def _begin(self, task: PassTask, number: int) -> None:
        """Wait for the needs of a task of pass `number`, and make the unit use its device copy. RuntimeError if another
        task is next.
        """
        if not self.passes.task(number, task):
            raise out_of_order(task, self.units[task.unit].name)
        if task.kind == "backward" and task.unit == len(self.units) - 1:
            self._free_bottom()
            self.engine.computed(self._began, self.flow.top_seconds)
            self._backs += 1
            self.flow.top_ends(first=self._backs == 1)
            self._begin_half(Half(number, "backward"))
        self.landing.deliver()
        self.gathering.collect()
        if task.kind == "forward":
            self.gathering.need(task.unit)
        for need in self._needs.pop((number, task)):
            need.wait(f"memory for {task.kind} of {self.units[task.unit].name}")
        if task.kind in ("forward", "backward") and task.unit in self.device_copy:
            self.device_copy[task.unit].show(True)
        self._began = time.perf_counter()

    def _urgency(self, half: Half, index: int, *, gradients: bool = False) -> Urgency:
        first = index if gradients or half.kind == "forward" else -index
        return self.steps, self._order[half], int(gradients), first

    # Forward and backward

    def _forward_ends(self, index: int, number: int, swapped: Swapped | None) -> None:
        self.engine.computed(self._began, self.flow.times[index].forward)
        if index in self.device_copy:
            self.device_copy[index].show(False)
        half = Half(number, "forward")
        self.flow.forward_ends(half, index, self._urgency(half, index), swapped)
        if index == len(self.units) - 1:
            self._begin(PassTask("top", 0), number)

    def _backward_ends(self, index: int, number: int) -> None:
        left = self.passes.left.get(number)
        if not left or left[0].unit != max(index - 1, 0):
            raise RuntimeError(f"memory: the backward pass of {self.units[index].name} ended out of its order")
        self.engine.computed(self._began, self.flow.times[index].backward)
        half, first, device_copy = Half(number, "backward"), self._backs == 1, self.device_copy.get(index)
        landed, send = self.engine.event(), nothing
        if device_copy is not None:
            device_copy.show(False)
            send = self._sending(index, device_copy)
            self.landing.expect(landed)
        urgency = self._urgency(half, index, gradients=True)
        self.flow.backward_ends(half, index, urgency, first=first, send=send, landed=landed.fire)
        if index == 0:
            self._begin(PassTask("bottom", 0), number)
            self._bottom = self.flow.bottom_bytes(first=first)

    # Gradients

    def _sending(self, index: int, device_copy: DeviceCopy) -> Callable[[], None]:
        """The work that moves a unit's gradients to the host, or to its file; later batches' are added there."""
        box, filed = [device_copy.take_gradients()], self.flow.costs[index].filed
        last = self._backs == self.plan.accumulation
        stored = self.stored[index] if filed and self._backs == 1 else None

        def work() -> None:
            made = box.pop()
            if stored is not None:
                stored.put_gradients(made)
            pairs = [(own, one) for own, one in zip(device_copy.host, made, strict=True) if one is not None]
            copies = [one.to(own.dtype) for own, one in pairs] if filed else None  # in the same memory
            if copies is None:
                copies = self.engine.moves.to_host([one for _, one in pairs], [own.dtype for own, _ in pairs])
            shown = None if stored is None else stored.show_gradients
            self.landing.add(Landed(index, last, [own for own, _ in pairs], copies, shown))

        return work

    def gradients(self) -> None:
        """Wait until all gradients of the passes so far are on their parameters."""
        self.finish_pass()
        self.landing.all()

    def submit(
        self, lane: EngineLane, urgency: Urgency, seconds: float, work: LaneAction, done: LaneAction, what: str = ""
    ) -> None:
        """Submit work to a lane. Its allocations count as the host's, unless it reports them to the meter itself."""

        def on_the_host() -> None:
            with host_work():
                work()

        self.engine.submit(lane, urgency, seconds, on_the_host, done)

    def discard(self) -> None:
        """Drop the gradients of the passes since the last step."""
        if self._backs:
            self.flow.drop_gradients()
        self.batches = self._backs = 0
        self._order.clear()
        self.flow.slots.discard()

    def end_step(self) -> None:
        """End a step: the device's updates are done; drop its gradients."""
        self.discard()
        self.steps += 1
