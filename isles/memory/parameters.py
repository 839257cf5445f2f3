"""The device's copy of a unit's parameters: parameters of its own, whose storages are filled, emptied and filled again.

The unit's modules show the host's parameters, as anyone who reads the model expects, and the device's while the unit
runs. Views that autograd has saved stay valid when a storage is emptied and filled again, for it is the same storage.
Any other write to the host's parameters (an outer step that lands, a checkpoint that is loaded) is noticed by their
version counters.

`Arrivals` brings gradients from the device to the parameters of the host. `PartialOptimizer` is a part of one
optimizer: it updates some of its parameters, with the whole one's settings and state.

Host states that several workers share (after AutoHete, arXiv 2503.01890, and ZeRO, Rajbhandari et al., 2020): of every
unit that is updated on the host, each of R data parallel workers keeps the states of 1/R, updates that share of the
weights, and gets the others' before the next forward pass needs them. A share is a run of entries of every parameter,
of whole vectors of the processor (`_RUN`), so each entry is updated by the same instructions as if the parameter were
updated whole: the bits are those of workers that share none.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isles.base.wrapping import Spreading, SpreadShares, host_work
from isles.memory.engines.base import Engine, LaneEvent, Moves
from isles.memory.meter import MemoryMeter
from isles.memory.units import ModelUnit, travels_as


class DeviceCopy:
    """One unit's copy on `device`. stays: it is never emptied, only refreshed. fetch: reads the host's weights from a
    file; None: they are copied from the host's parameters.
    """

    def __init__(
        self,
        unit: ModelUnit,
        device: torch.device,
        autocast: str,
        *,
        stays: bool,
        fetch: Callable[[Sequence[Tensor]], None] | None = None,
        meter: MemoryMeter | None = None,
        moves: Moves | None = None,
    ) -> None:
        self.slots, self.stays, self.meter = unit.slots, stays, meter
        self._moves = Moves() if moves is None else moves
        self.host, self._fetch = unit.parameters, fetch
        self.device = [
            nn.Parameter(
                torch.empty_like(slot.parameter, dtype=travels_as(slot, autocast), device=device),
                slot.parameter.requires_grad,
            )
            for slot in unit.slots
        ]
        self._sizes = [parameter.untyped_storage().nbytes() for parameter in self.device]
        self._seen: list[int] = []
        if stays:
            self._track()
            self.refresh()
        else:
            self.empty()

    @property
    def nbytes(self) -> int:
        """Bytes of the copy on the device."""
        return sum(self._sizes)

    def show(self, on_device: bool) -> None:
        """Make the unit's modules use the device's parameters, or the host's."""
        for slot, device_copy in zip(self.slots, self.device, strict=True):
            slot.module._parameters[slot.name] = device_copy if on_device else slot.parameter

    def fill(self) -> None:
        """Allocate the storages and copy the host's weights."""
        with self._moves.room():
            for parameter, size in zip(self.device, self._sizes, strict=True):
                parameter.untyped_storage().resize_(size)
        self._track()
        self.refresh()

    def empty(self) -> None:
        if self.meter is not None:
            self.meter.forget(*self.device)
        for parameter in self.device:
            parameter.untyped_storage().resize_(0)

    def refresh(self) -> None:
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(self.device)):
            if self._fetch is not None:
                self._fetch(self.device)
            else:
                self._moves.fill(self.device, self.host)
        self._seen = [own._version for own in self.host]

    @property
    def stale(self) -> bool:
        """Whether the host's weights were written to since they were copied."""
        return self._seen != [own._version for own in self.host]

    def take_gradients(self) -> list[Tensor | None]:
        """Take the gradients of the device's parameters, and clear them."""
        taken = [parameter.grad for parameter in self.device]
        for parameter in self.device:
            parameter.grad = None
        return taken

    def _track(self) -> None:
        if self.meter is not None:
            self.meter.track(*self.device)


class Landed(NamedTuple):
    """Gradients of a unit that have arrived on the host, for the parameters that have one. last: of the step's last
    batch. shown: called when they are on the parameters.
    """

    unit: int
    last: bool
    parameters: list[nn.Parameter]
    gradients: list[Tensor]
    shown: Callable[[], None] | None


class Arrivals:
    """Gradients that arrive on the host, until the computing thread takes them. arrived: called with a unit whose
    gradients of the step's last batch are on its parameters.
    """

    def __init__(self, arrived: Callable[[int], None]) -> None:
        self.arrived = arrived
        self._landed: deque[Landed] = deque()
        self._in_transit: list[LaneEvent] = []

    def expect(self, landing: LaneEvent) -> None:
        """Note that gradients were sent; `landing` fires after `add` was called with them."""
        self._in_transit.append(landing)

    def add(self, landed: Landed) -> None:
        """Add gradients that have arrived on the host. On a lane's thread."""
        self._landed.append(landed)

    def deliver(self) -> None:
        """Put arrived gradients on their parameters, on this thread, so that their hooks run here."""
        while self._landed:
            unit, last, parameters, gradients, shown = self._landed.popleft()
            with host_work(), torch.enable_grad():
                torch.autograd.backward(parameters, gradients)
                del gradients
                if shown is not None:
                    shown()
            if last:
                self.arrived(unit)

    def all(self) -> None:
        """Wait for all sent gradients, and deliver them."""
        for event in self._in_transit:
            event.wait("a gradient on the host")
        self._in_transit.clear()
        self.deliver()


Settings = list[dict[str, Any]]


def settings_of(optimizer: Optimizer) -> Settings:
    """A copy of the current settings (learning rate, betas, ...) of all groups."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def same_settings(one: Settings, other: Settings) -> bool:
    """Whether all groups have equal settings."""
    return all(
        a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a) for a, b in zip(one, other, strict=True)
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    return one == other


class PartialOptimizer:
    """The part of `whole` that updates `parameters`. Uses the state of `whole`, created at the first update."""

    def __init__(self, whole: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        wanted = {id(parameter) for parameter in self.parameters}
        self.whole = whole
        self._groups: list[tuple[int, list[nn.Parameter]]] = []
        for number, group in enumerate(whole.param_groups):
            own = [parameter for parameter in group["params"] if id(parameter) in wanted]
            if own:
                self._groups.append((number, own))
        # Its class and attributes without its constructor, whose arguments are not known.
        self._optimizer: Optimizer = object.__new__(type(whole))
        attributes: Mapping[str, Any] = whole.__dict__
        self._optimizer.__dict__.update({key: value for key, value in attributes.items() if key != "step"})
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):  # those are of the whole step
            self._optimizer.__dict__[hooks] = OrderedDict()

    @property
    def empty(self) -> bool:
        """Whether it has nothing to update."""
        return not self._groups

    def update(self, settings: Settings, gradients: Sequence[Tensor | None], state: Any = None) -> None:
        """Update by these gradients of the parameters, in their order, and leave none on them. state: as in `step`."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.step(settings, state)
        for parameter in self.parameters:
            parameter.grad = None

    def step(
        self,
        settings: Sequence[Mapping[str, Any]],
        state: Any = None,
        instead: Mapping[nn.Parameter, nn.Parameter] | None = None,
    ) -> None:
        """Update by the parameters' gradients, with these settings of all groups of the whole optimizer. state: by
        parameter; None for the whole one's. instead: what stands for each parameter, with a gradient of its own.
        """
        if self.empty:
            return
        states = self.whole.state if state is None else state
        stands_for: dict[Any, nn.Parameter] = {}
        stands_for |= {} if instead is None else {stand_in: parameter for parameter, stand_in in instead.items()}
        shown = {stand_in: states[parameter] for stand_in, parameter in stands_for.items() if parameter in states}
        self._optimizer.state = states if instead is None else defaultdict(dict, shown)
        self._optimizer.param_groups = [
            {**settings[number], "params": own if instead is None else [instead[parameter] for parameter in own]}
            for number, own in self._groups
        ]
        self._optimizer.step()
        for stand_in, values in self._optimizer.state.items() if stands_for else ():
            states[stands_for[stand_in]] = values
        self._optimizer.state, self._optimizer.param_groups = (
            defaultdict(dict),
            [],
        )  # it holds neither states nor stand-ins


_RUN = 64  # entries: a multiple of any processor's vector
_BY_ENTRY = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop)


def runs(tensor: Tensor, size: int) -> list[Tensor]:
    """Flat views of a contiguous tensor, one for each of `size` workers, which together cover it."""
    each = -(-tensor.numel() // (size * _RUN)) * _RUN
    flat = tensor.view(-1)
    return [flat[position * each : (position + 1) * each] for position in range(size)]


def portions_of(units: Sequence[Sequence[Tensor]], size: int) -> list[list[int]]:
    """Bytes of each worker's share of every unit's parameters."""
    return [
        [sum(runs(tensor.detach(), size)[position].nbytes for tensor in unit) for position in range(size)]
        for unit in units
    ]


def refuse_unshared(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """ValueError if the update of a share of a parameter needs the whole parameter."""
    if type(optimizer) not in _BY_ENTRY:
        raise ValueError(
            f"memory.shard: {type(optimizer).__name__} may look at a parameter as a whole, so no worker can update a "
            'share of it: choose inner.optimizer = "adamw", or memory.shard = false'
        )
    if not all(parameter.is_contiguous() for parameter in parameters):
        raise ValueError("memory.shard: a parameter is not contiguous: make it so, or set memory.shard = false")


class SharedPart:
    """As `PartialOptimizer`, for share `position` of `size`: the states of a parameter are flat, of its share.

    parameters: all parameters of the whole part.
    """

    def __init__(self, part: PartialOptimizer, parameters: Sequence[nn.Parameter], position: int, size: int) -> None:
        self.part, self.parameters, self.position, self.size = part, list(parameters), position, size
        refuse_unshared(part.whole, self.parameters)

    @property
    def rows(self) -> list[list[Tensor]]:
        """All workers' shares of the parameters, as live views."""
        return [runs(parameter.detach(), self.size) for parameter in self.parameters]

    def update(self, settings: Settings, gradients: Sequence[Tensor | None]) -> None:
        instead = dict[nn.Parameter, nn.Parameter]()
        for parameter, rows, gradient in zip(self.parameters, self.rows, gradients, strict=True):
            own = instead[parameter] = nn.Parameter(rows[self.position], parameter.requires_grad)
            if gradient is not None and own.numel():
                own.grad = runs(gradient.contiguous(), self.size)[self.position]
        self.part.step(settings, None, instead)

    def keep_own(self) -> None:
        """Of states that were loaded, keep the own runs: those of whole parameters are cut, shares must be the own.
        ValueError for shares among another number of workers.
        """
        whole = self.part.whole.state
        for parameter, rows in zip(self.parameters, self.rows, strict=True):
            entries = rows[self.position].numel()
            for key, value in whole.get(parameter, {}).items():
                if not isinstance(value, Tensor) or value.ndim == 0:
                    continue
                if value.shape == parameter.shape:
                    whole[parameter][key] = runs(value.contiguous(), self.size)[self.position].clone()
                elif value.numel() != entries:
                    raise ValueError(
                        "memory.shard: the states are shares among another number of workers: resume with as many, "
                        "each with its own"
                    )


class Gathering:
    """Weights that were updated in shares, in transit to all workers; none without `spread`. names: of the units."""

    def __init__(self, engine: Engine, names: Sequence[str] = (), spread: SpreadShares | None = None) -> None:
        self._engine, self._names, self._spread = engine, names, spread
        self._own: dict[int, LaneEvent] = {}  # of units whose weights are not whole: the own share is on its way
        self._in_progress: dict[int, tuple[Spreading, Callable[[], None]]] = {}
        self._rounds: dict[int, int] = defaultdict(int)
        self._lock = threading.Lock()

    def expect(self, unit: int) -> None:
        """The unit's weights will be updated."""
        self._own[unit] = self._engine.event()

    def begin(self, unit: int, rows: Sequence[Sequence[Tensor]], landed: Callable[[], None]) -> None:
        """Send the own updated share; `landed` is called once all shares are there. On any thread."""
        assert self._spread is not None
        with host_work():
            spreading = self._spread(unit, self._rounds[unit], rows)
        self._rounds[unit] += 1
        with self._lock:
            self._in_progress[unit] = spreading, landed
        self._own[unit].fire()

    def collect(self) -> None:
        """Complete the arrived exchanges, on the computing thread."""
        with self._lock:
            come = [unit for unit, (spreading, _) in sorted(self._in_progress.items()) if spreading.done()]
        for unit in come:
            self._land(unit)

    def need(self, unit: int) -> None:
        """Wait until the unit's weights are complete, on the computing thread."""
        own = self._own.get(unit)
        if own is not None:
            own.wait(f"the update of {self._names[unit]}")
            self._land(unit)

    def _land(self, unit: int) -> None:
        with self._lock:
            spreading, landed = self._in_progress.pop(unit)
        with host_work(), torch.no_grad():
            spreading.land()
        del self._own[unit]
        landed()


def refuse_shares(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """ValueError if loaded states are shares, but this run has no shares."""
    for parameter in parameters:
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
                raise ValueError(
                    "memory.shard: the states are a share of the whole: resume with memory.shard = true and as many "
                    "workers"
                )
