"""Profile the bytes of a model's units, without the memory that a run would need.

One step runs on fake CPU tensors, which have shapes and formats but no numbers. The profile counts every storage that
the operations allocate and free, so the bytes are those of the real step. (The meta device would decompose attention,
and its T x T scores would be counted; real CPU and GPU kernels do not allocate them.) The step runs with activations
saved and with every unit recomputed; under bfloat16 autocast also with the units' matrices in bfloat16, as they travel.

FLOPs are counted in closed form for Isles' own decoder. For other models attention is decomposed, because torch does
not count the CPU's attention kernel.

Fake tensors sometimes take another path than real ones, with other bytes: `LikeReal` corrects those cases.

A worker of fully sharded data parallel training has rows of everything on its device, and the full weights of a few
units while they are gathered (`fully_sharded`). There a plan only chooses between saving and recomputing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from isles.memory.costs import Ends, Passes, Profile, Transient, UnitProfile
from isles.memory.meter import MemoryMeter, nbytes, storages
from isles.memory.units import ModelUnit, edge, forwards, is_cast, tensors_in, travels_as, units_of
from isles.models.blocks import blocks_of
from isles.models.decoder import Decoder
from isles.models.sizes import flops_per_token

_MOST = 2**24  # entries
_NORMS = (torch.ops.aten.native_batch_norm.default, torch.ops.aten._native_batch_norm_legit.default)


class LikeReal(TorchDispatchMode):
    """Use this inside a FakeTensorMode, so that a step on fake tensors takes the bytes of a real one.

    Integers that depend on no weight and no batch, such as positions, keep their numbers, because models read them. A
    model of transformers, for example, checks whether its positions are those of several packed texts, and builds an
    attention mask if it cannot know. A bfloat16 batch norm with float32 weights has float32 statistics, which the fake
    operation gets wrong.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NORMS and args[1] is not None and args[0].dtype != args[1].dtype:
            output, *statistics = func(*args, **kwargs)
            return output, *(statistic.to(args[1].dtype) for statistic in statistics)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in inputs) or torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **kwargs)
        try:
            output = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            output = None
        else:
            outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            if any(leaf.is_floating_point() or leaf.is_complex() or leaf.numel() > _MOST for leaf in outputs):
                return output
        with unset_fake_temporarily():
            return func(*args, **kwargs)


SCALARS = 4096  # bytes that a training loop keeps for a loss, outside the profiled step

StateBytes = Callable[[Tensor], int]
Loss = Callable[[nn.Module, Any], Tensor]
ProfiledActivations = Literal["keep", "recompute"]


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The mean loss that the forward pass of a model of `isles.models` returns."""
    return model(batch).loss


def adamw_bytes(parameter: Tensor) -> int:
    """Bytes of AdamW's state of a parameter: two moments and a step count."""
    return 2 * parameter.nbytes + 4


@dataclass
class UnitTrace:
    """Bytes of one unit in one step: its input and output; what it saves, and the part of its input that the unit
    before also saves; live bytes at the begin, the peak and the end of each pass."""

    input: int = 0
    output: int = 0
    saved: int = 0
    shared_input: int = 0
    casts: int = 0
    forward_begin: int = 0
    forward_peak: int = 0
    forward_end: int = 0
    backward_begin: int = 0
    backward_peak: int = 0
    backward_end: int = 0


@dataclass
class Trace:
    """Bytes of one step. static: parameters and buffers. below: live when the top begins, if activations are saved.
    top: peak after the last unit. bottom: peak of the backward pass before the first unit. top_gradients: gradients on
    parameters when the last unit's backward pass begins.
    """

    units: list[UnitTrace] = field(default_factory=list)
    static: int = 0
    peak: int = 0
    below: int = 0
    top: int = 0
    bottom: int = 0
    top_gradients: int = 0


def profile(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss = own_loss,
    autocast: str = "none",
    state_bytes: StateBytes = adamw_bytes,
    name: str = "",
    moves: bool = True,
) -> Profile:
    """Profile the model at a batch. Model and batch stay unchanged, and may be on the meta device.

    batch: nested tensors that `loss(model, batch)` takes; their first axis is the sequences, the second, if any, the
    tokens. state_bytes: bytes of the optimizer's state of a parameter. moves: whether a plan may move units; if not,
    only the units on the device are profiled, in half the time. ValueError as in `units_of`.
    """
    units = units_of(model)

    def traced(device_copy: bool) -> list[Trace]:
        return [
            _fake_trace(model, units, batch, loss, autocast, activations, device_copy)
            for activations in ("keep", "recompute")
        ]

    resident = traced(False)
    device_copy = traced(True) if autocast == "bf16" and moves else resident
    keep = resident[0]
    flops, whole = _flops(model, units, batch, loss)
    stream = max(max(trace.input, trace.output) for trace in keep.units)
    first = tensors_in(batch)[0]
    inside = {id(parameter) for unit in units for parameter in unit.parameters}
    outside = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    begin, end = keep.units[0], keep.units[-1]
    carried = max(end.backward_begin - keep.below - keep.top_gradients, 0)
    ends = Ends(
        params=sum(parameter.numel() for parameter in outside),
        weights=sum(parameter.nbytes for parameter in outside),
        states=sum(state_bytes(parameter) for parameter in outside if parameter.requires_grad),
        buffers=nbytes(model.buffers()),
        before=max(begin.forward_begin - keep.static - begin.input, 0) + SCALARS,
        top=max(keep.top - keep.below - keep.top_gradients - carried - (stream - end.output), 0),
        bottom=max(keep.bottom - begin.backward_end - _bottom_gradients(outside, keep) - (stream - begin.input), 0),
        top_gradients=keep.top_gradients,
        bottom_gradients=_bottom_gradients(outside, keep),
        carried=carried,
        flops=whole - sum(flops),
    )
    profiles = []
    for index, unit in enumerate(units):
        parameters = unit.parameters
        moved = sum(slot.parameter.numel() * travels_as(slot, autocast).itemsize for slot in unit.slots)
        profiles.append(
            UnitProfile(
                name=unit.name,
                params=sum(parameter.numel() for parameter in parameters),
                weights=sum(parameter.nbytes for parameter in parameters),
                states=sum(state_bytes(parameter) for parameter in parameters if parameter.requires_grad),
                moved=moved,
                boundary=keep.units[index].input,
                resident=_passes(resident, index, sum(p.nbytes for p in parameters if p.requires_grad), stream),
                device_copy=_passes(device_copy, index, moved, stream),
                flops=flops[index],
                shared_input=keep.units[index].shared_input,
            )
        )
    return Profile(
        model=name or type(model).__name__,
        units=tuple(profiles),
        ends=ends,
        stream=stream,
        batch=first.shape[0],
        tokens=first.shape[1] if first.ndim > 1 else 1,
        autocast=autocast,
    )


def _bottom_gradients(outside: list[nn.Parameter], trace: Trace) -> int:
    return sum(parameter.nbytes for parameter in outside if parameter.requires_grad) - trace.top_gradients


def _passes(runs: list[Trace], index: int, gradients: int, stream: int) -> Passes:
    """Transients are the bytes of a pass beyond those that stay. The stream is counted only once, at its full size."""
    keep, recompute = runs[0].units[index], runs[1].units[index]
    allocated = keep.forward_peak - keep.forward_begin
    return Passes(
        saved=keep.saved,
        casts=keep.casts,
        keep=Transient(
            forward=max(keep.input + allocated - keep.saved - keep.casts - stream, 0),
            backward=_backward(keep, gradients, stream),
        ),
        recompute=Transient(
            forward=max(recompute.forward_peak - recompute.forward_begin - keep.casts - stream, 0),
            backward=_backward(recompute, gradients, stream),
        ),
    )


def _backward(trace: UnitTrace, gradients: int, stream: int) -> int:
    return max(trace.backward_peak - trace.backward_begin - gradients - (stream - trace.output), 0)


# ---------------------------------------------------------------------------------------------------------------------
# One step under the meter


def trace_step(
    model: nn.Module,
    units: list[ModelUnit],
    batch: Any,
    *,
    loss: Loss = own_loss,
    autocast: str = "none",
    activations: ProfiledActivations = "keep",
) -> Trace:
    """Run one forward and backward pass, and count bytes. Gradients stay on the parameters."""
    meter, trace = MemoryMeter(), Trace(units=[UnitTrace() for _ in units])
    meter.track(*model.parameters(), *model.buffers())
    trace.static = meter.live
    meter.track(*tensors_in(batch))
    highest, saved_before = [0], set[int]()  # saved_before: storages that the unit before saves

    def mark() -> int:
        """The peak since the last mark."""
        peak = meter.peak
        highest[0] = max(highest[0], peak)
        meter.peak = meter.live
        return peak

    def around(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        unit_trace, parameters = trace.units[index], {p.untyped_storage()._cdata for p in units[index].parameters}
        others = {buffer.untyped_storage()._cdata for buffer in model.buffers()}

        def backward_begins() -> None:
            peak = mark()
            unit_trace.backward_begin = meter.live
            if index == len(units) - 1:
                trace.top = peak
                trace.top_gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)

        def backward_ends() -> None:
            unit_trace.backward_peak, unit_trace.backward_end = mark(), meter.live

        def run(*args: Any, **named: Any) -> Any:
            inputs = tensors_in((args, named))
            unit_trace.input = nbytes(tensor for tensor in inputs if tensor.requires_grad)
            shared = {tensor.untyped_storage()._cdata for tensor in inputs if not tensor.requires_grad}
            entered = storages(tensor for tensor in inputs if tensor.requires_grad).keys()
            mark()
            unit_trace.forward_begin = meter.live
            args, named = edge(backward_ends, (args, named), always=True)
            saved, casts = dict[int, int](), dict[int, int]()

            def pack(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if storage._cdata not in parameters | others | shared and tensor.numel():
                    (casts if is_cast(tensor) else saved)[storage._cdata] = storage.nbytes()
                return tensor

            if activations == "recompute":
                output = checkpoint(forward, *args, use_reentrant=False, **named)
            else:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    output = forward(*args, **named)
            del args, named
            unit_trace.saved, unit_trace.casts = sum(saved.values()), sum(casts.values())
            unit_trace.shared_input = sum(size for key, size in saved.items() if key in entered & saved_before)
            saved_before.clear()
            saved_before.update(saved)
            unit_trace.output = nbytes(tensors_in(output))
            output = edge(backward_begins, output)
            unit_trace.forward_peak, unit_trace.forward_end = mark(), meter.live
            return output

        return run

    cast: AbstractContextManager[Any] = (
        torch.autocast("cpu", dtype=torch.bfloat16) if autocast == "bf16" else nullcontext()
    )
    with forwards(units, around), meter:
        with cast:
            value = loss(model, batch)
        value.backward()
        trace.bottom = mark()
    trace.peak = highest[0]
    # A unit that does not save its input still holds it at its end; it is freed before the top begins.
    begin, end = trace.units[0], trace.units[-1]
    stays = sum(unit.saved - unit.shared_input + unit.casts for unit in trace.units)
    trace.below = begin.forward_begin - begin.input + stays + end.output
    return trace


def _fake_trace(
    model: nn.Module, units: list[ModelUnit], batch: Any, loss: Loss, autocast: str, activations: str, device_copy: bool
) -> Trace:
    dtypes = (
        {slot.parameter: travels_as(slot, autocast) for unit in units for slot in unit.slots} if device_copy else {}
    )
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, _without_numbers(model, "cpu", dtypes), _shortened(model, units) as kinds, LikeReal():
        short = units_of(model)
        trace = trace_step(model, short, _like(batch, "cpu"), loss=loss, autocast=autocast, activations=activations)  # type: ignore[arg-type]
    return replace(trace, units=[trace.units[kind] for kind in kinds])


@contextmanager
def _shortened(model: nn.Module, units: list[ModelUnit]) -> Iterator[list[int]]:
    """Reduce a model of alike blocks to three temporarily. Yields the index of the representative of each block."""
    indices = range(len(units))
    alike = len({repr(unit.module) + repr([p.shape for p in unit.parameters]) for unit in units}) == 1
    if not alike or len(units) <= 3:
        yield list(indices)
        return
    blocks = model.get_submodule(blocks_of(model)[0])
    before = dict(blocks._modules)
    try:
        every_block = list(before.values())
        blocks._modules = {str(number): every_block[index] for number, index in enumerate((0, 1, len(units) - 1))}
        yield [0 if index == 0 else 2 if index == len(units) - 1 else 1 for index in indices]
    finally:
        blocks._modules = before


@contextmanager
def _without_numbers(model: nn.Module, device: str, dtypes: dict[Any, torch.dtype]) -> Iterator[None]:
    """Replace the model's tensors by empty ones on `device` temporarily."""
    empty_by_id, before = dict[int, Tensor](), list[tuple[dict[str, Any], str, Tensor]]()
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in empty_by_id:
                    empty = torch.empty(tensor.shape, dtype=dtypes.get(tensor, tensor.dtype), device=device)
                    parameter = isinstance(tensor, nn.Parameter)
                    empty_by_id[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if parameter else empty
                before.append((tensors, name, tensor))
    training = model.training
    model.train()
    try:
        for tensors, name, tensor in before:
            tensors[name] = empty_by_id[id(tensor)]
        yield
    finally:
        for tensors, name, tensor in before:
            tensors[name] = tensor
        model.train(training)


def _like(batch: Any, device: str) -> Any:
    """Zeros with the shapes and formats of the batch."""
    return tree_map(lambda x: torch.zeros(x.shape, dtype=x.dtype, device=device) if isinstance(x, Tensor) else x, batch)


# ---------------------------------------------------------------------------------------------------------------------
# Operations and seconds


def _flops(model: nn.Module, units: list[ModelUnit], batch: Any, loss: Loss) -> tuple[list[float], float]:
    """FLOPs of every unit's forward pass, and of the whole forward pass."""
    if isinstance(model, Decoder):
        sequences, tokens = batch.shape[0], batch.shape[1] - 1
        whole = flops_per_token(model.shape, backward=False, sequence=tokens) * sequences * tokens
        head = 2 * model.shape.vocab * model.shape.d_model * sequences * tokens
        return [(whole - head) / len(units)] * len(units), whole
    counted = [0.0] * len(units)
    counter = FlopCounterMode(display=False)

    def around(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            before = counter.get_total_flops()
            output = forward(*args, **named)
            counted[index] += counter.get_total_flops() - before
            return output

        return run

    decomposed = sdpa_kernel(SDPBackend.MATH)  # so that the products of attention are counted
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, _without_numbers(model, "cpu", {}), forwards(units, around), decomposed, counter, torch.no_grad():
        loss(model, _like(batch, "cpu"))
    return counted, float(counter.get_total_flops())


def fully_sharded(
    unsharded: Profile, model: nn.Module, size: int, *, keeps_gathered: bool, batches: int, state_bytes: StateBytes
) -> Profile:
    """The profile of `model` at one of `size` workers. keeps_gathered: a unit's weights stay gathered from its forward
    to its backward pass. batches: per step; gradients are unsharded until the last batch.

    Counts as torch's `fully_shard` works on a CPU. A gathered unit exists twice while its parameters are split from the
    buffer; the next unit's weights arrive during a backward pass; gradients are copied once more for the scatter.
    """
    units = units_of(model)
    inside = {id(parameter) for unit in units for parameter in unit.parameters}
    outside = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    whole = [size * _share(unit.parameters, size) for unit in units]
    trained = [size * _share([p for p in unit.parameters if p.requires_grad], size) for unit in units]
    most = max(whole, default=0)
    ends = unsharded.ends
    waiting = (sum(whole) if keeps_gathered else 0) + (sum(trained) if batches > 1 else 0)
    sharded = []
    for index, unit in enumerate(units):
        unit_profile = unsharded.units[index]

        def passes(full: Passes, whole: int, trained: int) -> Passes:
            gathered = 0 if keeps_gathered else whole

            def sharded_transient(transient: Transient) -> Transient:
                scattered = trained + 2 * trained // size  # the copy, all workers' parts for this worker, their mean
                backward = max(transient.backward, scattered) + (trained if batches == 1 else 0)
                ahead = 0 if keeps_gathered else most
                return Transient(gathered + max(transient.forward, whole), gathered + ahead + backward)

            return replace(full, keep=sharded_transient(full.keep), recompute=sharded_transient(full.recompute))

        resident = passes(unit_profile.resident, whole[index], trained[index])
        weights = _share(unit.parameters, size)
        states = sum(_states(parameter, size, state_bytes) for parameter in unit.parameters)
        sharded.append(replace(unit_profile, weights=weights, states=states, resident=resident))
    return replace(
        unsharded,
        units=tuple(sharded),
        ends=replace(
            ends,
            weights=_share(outside, size),
            states=sum(_states(parameter, size, state_bytes) for parameter in outside),
            before=ends.before + size * _share(outside, size) + waiting,
            top=max(ends.top, size * _share(outside, size)),
        ),
    )


def _share(tensors: Sequence[Tensor], size: int) -> int:
    """Bytes of the first worker's rows; no worker has more."""
    return sum(-(-tensor.shape[0] // size) * (tensor.nbytes // max(tensor.shape[0], 1)) for tensor in tensors)


def _states(parameter: Tensor, size: int, state_bytes: StateBytes) -> int:
    if not parameter.requires_grad:
        return 0
    whole, rows = parameter.shape[0], -(-parameter.shape[0] // size)
    return -(-state_bytes(parameter) * rows // max(whole, 1))
