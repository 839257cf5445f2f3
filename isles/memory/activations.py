"""Activations that a unit's forward pass saves for the backward pass: swapped to the host and back, or recomputed."""

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
    """One storage: its copy on the device, its copy on the host, and the number of saved tensors still to be read."""

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
    """The saved tensors of one unit and pass, by storage. Each storage moves once, however many views of it are saved.

    Two kinds stay on the device: storages in `others` (parameters, buffers, inputs shared with other units), and
    autocast's copies of weights. A storage is freed when the last tensor saved on it has been read.
    """

    def __init__(self, others: Iterable[Tensor], device: torch.device, meter: MemoryMeter | None, moves: Moves) -> None:
        self._device, self._moves = device, moves
        self._others = {tensor.untyped_storage()._cdata for tensor in others}
        self._store: dict[int, _Saved] = {}
        self.meter = meter

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that move."""
        copies = (entry.device if entry.device is not None else entry.host for entry in self._store.values())
        return sum(tensor.untyped_storage().nbytes() for tensor in copies if tensor is not None)

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
        """Move all storages to the host. Runs on a lane, after the forward pass."""
        entries = list(self._store.values())
        on_device = [entry.device for entry in entries if entry.device is not None]
        assert len(on_device) == len(entries)
        for entry, copy in zip(
            entries, self._moves.to_host(on_device, [tensor.dtype for tensor in on_device]), strict=True
        ):
            entry.device, entry.host = None, copy

    def to_device(self) -> None:
        """Bring all storages back to the device. Runs on a lane, before the backward pass."""
        entries = list(self._store.values())
        on_host = [entry.host for entry in entries if entry.host is not None]
        assert len(on_host) == len(entries)
        for entry, copy in zip(entries, self._moves.to_device(on_host, self._device), strict=True):
            entry.device, entry.host = copy, None
            if self.meter is not None:
                self.meter.track(copy)


class Repeatable:
    """A unit's forward that may run twice in one step. Only the first run changes buffers that modules update in place
    (a BatchNorm's running statistics); the second run writes to copies.
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
            output = self.forward(*args, **named)
            self._moved = [
                (table, name)
                for (table, name, buffer), version in zip(buffers, before, strict=True)
                if buffer._version != version
            ]
            return output
        buffers = [(table, name, table[name]) for table, name in self._moved]
        try:
            for table, name, buffer in buffers:
                table[name] = buffer.clone()
            return self.forward(*args, **named)
        finally:
            for table, name, buffer in buffers:
                table[name] = buffer


class Remade:
    """Runs `model` under a plan that moves nothing, until `close`: every block saves or recomputes its activations.
    It does not touch the optimizer, the weights or the order of passes. So it works with methods that shard parameters,
    with gradient scalers, and with several passes in flight.
    """

    def __init__(self, plan: MemoryPlan, model: nn.Module) -> None:
        assert all(placement.tier == "device" and placement.activations != "swap" for placement in plan.placements)
        self.plan, self.device = plan, next(model.parameters()).device
        units = zip(units_of(model), plan.placements, strict=True)
        self._modules = [unit.module for unit, placement in units if placement.activations == "recompute"]
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
    """Let the meter track the memory outside the passes: weights, buffers, and states that the first step creates."""
    meter.track(*model.parameters(), *model.buffers())

    def stepped(*_: Any) -> None:
        values = (value for state in inner.state.values() for value in state.values())
        meter.track(*(value for value in values if isinstance(value, Tensor)))

    inner.register_step_post_hook(stepped)
