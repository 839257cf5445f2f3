"""Host states that several workers share: of every unit that is updated on the host, each of R data parallel workers
keeps the states of 1/R, updates that share of the weights, and gets the others' before the next forward pass needs them
(after AutoHete, arXiv 2503.01890, and ZeRO, Rajbhandari et al., 2020).

A share is a run of entries of every parameter, of whole vectors of the processor (`_RUN`), so that each entry is
updated by the same instructions as if the parameter were updated whole: the bits are those of workers that share none.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isles.base.wrapping import Spreading, SpreadShares, host_work
from isles.memory.engines.base import Engine, LaneEvent
from isles.memory.parameters import PartialOptimizer, Settings

_RUN = 64  # entries: a multiple of any processor's vector
_BY_ENTRY = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop)


def runs(tensor: Tensor, size: int) -> list[Tensor]:
    """Flat views of a contiguous tensor, one for each of `size` workers; together they are all of it."""
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
    """ValueError where a share of a parameter cannot be updated for itself."""
    if type(optimizer) not in _BY_ENTRY:
        raise ValueError(
            f"memory.shard: {type(optimizer).__name__} may look at a parameter as a whole, so no worker can update a "
            'share of it: choose inner.optimizer = "adamw", or memory.shard = false'
        )
    if not all(parameter.is_contiguous() for parameter in parameters):
        raise ValueError("memory.shard: a parameter is not contiguous: make it so, or set memory.shard = false")


class SharedPart:
    """As `PartialOptimizer`, for the share of `position` among `size`: the states of a parameter are flat, of its run.

    parameters: all that the whole part would update.
    """

    def __init__(self, part: PartialOptimizer, parameters: Sequence[nn.Parameter], position: int, size: int) -> None:
        self.part, self.parameters, self.position, self.size = part, list(parameters), position, size
        refuse_unshared(part.whole, self.parameters)

    @property
    def rows(self) -> list[list[Tensor]]:
        """Everyone's runs of the parameters, live."""
        return [runs(parameter.detach(), self.size) for parameter in self.parameters]

    def update(self, settings: Settings, gradients: Sequence[Tensor | None]) -> None:
        state, instead = defaultdict[Any, dict[str, Any]](dict), dict[nn.Parameter, nn.Parameter]()
        whole = self.part.whole.state
        for parameter, rows, gradient in zip(self.parameters, self.rows, gradients, strict=True):
            own = instead[parameter] = nn.Parameter(rows[self.position], parameter.requires_grad)
            if gradient is not None and own.numel():
                own.grad = runs(gradient.contiguous(), self.size)[self.position]
            if parameter in whole:
                state[own] = whole[parameter]
        self.part.step(settings, state, instead)
        for parameter, own in instead.items():
            if state.get(own):
                whole[parameter] = state[own]

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
    """Weights that were updated in shares, on their way to all workers: none where there is no `spread`. names: of the
    units.
    """

    def __init__(self, engine: Engine, names: Sequence[str] = (), spread: SpreadShares | None = None) -> None:
        self._engine, self._names, self._spread = engine, names, spread
        self._own: dict[int, LaneEvent] = {}  # of units whose weights are not whole: the own share is on its way
        self._in_progress: dict[int, tuple[Spreading, Callable[[], None]]] = {}
        self._rounds: dict[int, int] = defaultdict(int)
        self._lock = threading.Lock()

    def expect(self, unit: int) -> None:
        """Its weights will be updated."""
        self._own[unit] = self._engine.event()

    def begin(self, unit: int, rows: Sequence[Sequence[Tensor]], landed: Callable[[], None]) -> None:
        """The own share is updated; `landed` is called once all are there. On any thread."""
        assert self._spread is not None
        with host_work():
            spreading = self._spread(unit, self._rounds[unit], rows)
        self._rounds[unit] += 1
        with self._lock:
            self._in_progress[unit] = spreading, landed
        self._own[unit].fire()

    def collect(self) -> None:
        """Take in what has come, on the computing thread."""
        with self._lock:
            come = [unit for unit, (spreading, _) in sorted(self._in_progress.items()) if spreading.done()]
        for unit in come:
            self._land(unit)

    def need(self, unit: int) -> None:
        """Wait until the unit's weights are whole, on the computing thread."""
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
    """ValueError where loaded states are shares, and nobody shares here."""
    for parameter in parameters:
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
                raise ValueError(
                    "memory.shard: the states are a share of the whole: resume with memory.shard = true and as many "
                    "workers"
                )
