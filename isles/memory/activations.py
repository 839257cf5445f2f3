"""What a unit's forward pass saves for the backward pass: swapped to the host and back, or recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from isles.memory.engines.base import Moves
from isles.memory.meter import MemoryMeter
from isles.memory.plan import MemoryPlan
from isles.memory.units import is_cast, units_of


@dataclass
class _Saved:
    """One storage: on the device, on the host, and how many saved tensors still read it."""

    device: Tensor | None
    host: Tensor | None = None
    readers: int = 0


class _Ticket(NamedTuple):
    """What autograd keeps in place of a saved tensor."""

    key: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Swapped:
    """The saved tensors of one unit and pass, by storage: each moves once, however many views of it were saved.

    Left where they are: the storages in `others` (parameters, buffers, what other units get too), and casts that
    autocast makes of weights. A storage is freed when the last that saved it has read it.
    """

    def __init__(self, others: Iterable[Tensor], device: torch.device, meter: MemoryMeter | None, moves: Moves) -> None:
        self._device, self._moves = device, moves
        self._others = {tensor.untyped_storage()._cdata for tensor in others}
        self._store: dict[int, _Saved] = {}
        self.meter = meter

    @property
    def nbytes(self) -> int:
        """Of what moves."""
        both = (one.device if one.device is not None else one.host for one in self._store.values())
        return sum(tensor.untyped_storage().nbytes() for tensor in both if tensor is not None)

    def pack(self, tensor: Tensor) -> Any:
        """For `torch.autograd.graph.saved_tensors_hooks`."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._others or not tensor.numel() or is_cast(tensor):
            return tensor
        if key not in self._store:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._store[key] = _Saved(whole)
        self._store[key].readers += 1
        return _Ticket(key, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: Any) -> Tensor:
        """For `torch.autograd.graph.saved_tensors_hooks`."""
        if isinstance(packed, Tensor):
            return packed
        entry = self._store[packed.key]
        whole = entry.device
        if whole is None:
            raise RuntimeError("memory: a swapped activation is read before its block's backward pass has begun")
        entry.readers -= 1
        if not entry.readers:
            entry.device = None
        storage = whole.untyped_storage()
        return torch.empty(0, dtype=packed.dtype, device=whole.device).set_(
            storage, packed.offset, packed.size, packed.stride
        )

    def to_host(self) -> None:
        """Move all; on a lane, after the forward pass."""
        entries = list(self._store.values())
        there = [entry.device for entry in entries if entry.device is not None]
        assert len(there) == len(entries)
        for entry, copy in zip(entries, self._moves.to_host(there, [one.dtype for one in there]), strict=True):
            entry.device, entry.host = None, copy

    def to_device(self) -> None:
        """Bring all back; on a lane, before the backward pass."""
        entries = list(self._store.values())
        there = [entry.host for entry in entries if entry.host is not None]
        assert len(there) == len(entries)
        for entry, copy in zip(entries, self._moves.to_device(there, self._device), strict=True):
            entry.device, entry.host = copy, None
            if self.meter is not None:
                self.meter.track(copy)


class Repeatable:
    """A unit's forward that may run twice in one step: what its modules count (a BatchNorm's running statistics) moves
    the first time only. In the second run they write to copies.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module, self.forward = module, forward
        self._moved: list[tuple[dict[str, Any], str]] | None = None

    def __call__(self, *args: Any, **named: Any) -> Any:
        buffers = [
            (module._buffers, name, buffer)
            for module in self.module.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        if self._moved is None:
            before = [buffer._version for _, _, buffer in buffers]
            made = self.forward(*args, **named)
            self._moved = [
                (table, name)
                for (table, name, buffer), version in zip(buffers, before, strict=True)
                if buffer._version != version
            ]
            return made
        buffers = [(table, name, table[name]) for table, name in self._moved]
        try:
            for table, name, buffer in buffers:
                table[name] = buffer.clone()
            return self.forward(*args, **named)
        finally:
            for table, name, buffer in buffers:
                table[name] = buffer


class Remade:
    """`model` under a plan that moves nothing, until `close`: every block saves its activations, or recomputes
    them. Optimizer, weights and the order of passes are left alone, so it goes with methods that shard parameters,
    with gradient scalers, and with several passes in flight.
    """

    def __init__(self, plan: MemoryPlan, model: nn.Module) -> None:
        assert all(one.tier == "device" and one.activations != "swap" for one in plan.placements)
        self.plan, self.device = plan, next(model.parameters()).device
        units = zip(units_of(model), plan.placements, strict=True)
        self._modules = [unit.module for unit, one in units if one.activations == "recompute"]
        for module in self._modules:
            module.forward = partial(_again, module, module.forward)  # type: ignore[method-assign]

    def close(self) -> None:
        """Give the blocks their own forward back."""
        for module in self._modules:
            module.__dict__.pop("forward", None)


def _again(module: nn.Module, forward: Any, *args: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **named)
    return checkpoint(Repeatable(module, forward), *args, use_reentrant=False, **named)


def count_all(meter: MemoryMeter, model: nn.Module, inner: Optimizer) -> None:
    """Tell the meter what is there beside the passes: weights, buffers, and the states that the first step makes."""
    meter.track(*model.parameters(), *model.buffers())

    def stepped(*_: Any) -> None:
        values = (value for state in inner.state.values() for value in state.values())
        meter.track(*(value for value in values if isinstance(value, Tensor)))

    inner.register_step_post_hook(stepped)
