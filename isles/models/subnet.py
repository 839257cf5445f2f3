"""The units of a model, and the narrower model that has only some of them.

    model -> split_axes: parameter name -> one `Axis` (or None) per dimension
    full tensor  -- take -->  the part of some units  -- put -->  the same entries of the full tensor
    fit: sets the modules' widths to those of their parameters

A unit is an attention head, a hidden unit of the gated MLP, or a neuron of a hidden layer. All its weights belong to
it: those that compute it (rows) and those that read it (columns). The residual width, inputs and outputs stay whole.

A user's model defines its units itself: its method `split_axes()` returns the mapping. Its method `fit_widths()`, if
any, is called whenever the widths of the parameters have changed (to set the number of heads, for example).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from isles.models.decoder import Attention, Decoder

ELEMENTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Identity, nn.Dropout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A dimension of a parameter that consists of units, with `repeats` x units x `width` entries.

    layer: the layer of the units, such as "blocks.0.ffn". Each layer is divided independently, and the word after its
    last dot is the kind in `split`. units: number in the full model. width: neighbouring entries of one unit (of a
    head). repeats: number of times that all units follow each other (3: queries, keys, values). reads: the parameter
    sums over this dimension, so some of the units give a part of the sum.
    """

    layer: str
    units: int
    width: int = 1
    repeats: int = 1
    reads: bool = False

    @property
    def kind(self) -> str:
        """The name of these units in `split`."""
        return self.layer.rpartition(".")[2]


Axes = tuple[Axis | None, ...]


def split_axes(model: nn.Module, kinds: str = "all") -> dict[str, Axes]:
    """The axes of the parameters with units of `kinds` (such as "ffn", "heads+ffn", or "all"), by name. ValueError if
    the model has no such units, or parts that Isles cannot divide.
    """
    all_axes = _axes(model)
    _refuse_misfits(model, all_axes)
    known = list(dict.fromkeys(axis.kind for axes in all_axes.values() for axis in axes if axis is not None))
    if not known:
        raise ValueError("this model has no hidden units to divide: all of its widths are inputs or outputs")
    wanted = known if kinds == "all" else kinds.split("+")
    for kind in wanted:
        if kind not in known:
            raise ValueError(f"split = {kinds!r}: this model has no {kind!r} to divide; its units: {', '.join(known)}")
    chosen = {
        name: tuple(axis if axis is not None and axis.kind in wanted else None for axis in axes)
        for name, axes in all_axes.items()
    }
    return {name: axes for name, axes in chosen.items() if any(axes)}


def layers_of(axes: Mapping[str, Axes]) -> dict[str, int]:
    """Layers and their numbers of units, in the order of the parameters. ValueError if two parameters disagree."""
    layers: dict[str, int] = {}
    for name, dimensions in axes.items():
        for axis in dimensions:
            if axis is not None and layers.setdefault(axis.layer, axis.units) != axis.units:
                raise ValueError(f"{name}: {axis.layer} has {axis.units} units here and {layers[axis.layer]} elsewhere")
    return layers


def take(tensor: Tensor, axes: Axes, units: Sequence[Tensor | None]) -> Tensor:
    """The part of `tensor` that belongs to `units`. units: for each dimension with an axis, the int64 numbers of the
    units to take, counted among the units in the tensor; None for other dimensions.
    """
    for dim, (axis, indices) in enumerate(zip(axes, units, strict=True)):
        if axis is not None:
            assert indices is not None
            tensor = tensor.index_select(dim, _entries(axis, indices, tensor.shape[dim]).to(tensor.device))
    return tensor


def put(tensor: Tensor, axes: Axes, units: Sequence[Tensor | None], part: Tensor) -> None:
    """Write `part` to the entries that `take` reads for the same `units`."""
    index = [
        torch.arange(size) if axis is None or indices is None else _entries(axis, indices, size)
        for axis, indices, size in zip(axes, units, tensor.shape, strict=True)
    ]
    divided = [dim for dim, axis in enumerate(axes) if axis is not None]
    if len(divided) == 1:
        tensor.index_copy_(divided[0], index[divided[0]].to(tensor.device), part)
    else:
        tensor[torch.meshgrid(*(entries.to(tensor.device) for entries in index), indexing="ij")] = part


def fit(model: nn.Module) -> None:
    """Set the modules' widths to those of their parameters."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, Attention):
            module.heads = module.out.weight.shape[1] // module.head_dim
        elif isinstance(module, nn.BatchNorm1d) and module.affine:
            module.num_features = len(module.weight)
        elif hasattr(module, "fit_widths"):
            module.fit_widths()  # type: ignore[operator]


def reads(axes: Axes) -> bool:
    """Whether the parameter sums over divided units."""
    return any(axis is not None and axis.reads for axis in axes)


def _entries(axis: Axis, indices: Tensor, size: int) -> Tensor:
    """The entries of the units `indices`, along a dimension of `size`."""
    first = (indices[:, None] * axis.width + torch.arange(axis.width)).reshape(-1)
    return (torch.arange(axis.repeats)[:, None] * (size // axis.repeats) + first).reshape(-1)


def _axes(model: nn.Module) -> dict[str, Axes]:
    if hasattr(model, "_orig_mod"):
        raise ValueError("torch.compile(model) hides the layers to divide: give the model itself, then model.compile()")
    if hasattr(model, "split_axes"):
        return dict(model.split_axes())  # type: ignore[operator]
    if isinstance(model, Decoder):
        return _decoder(model)
    if isinstance(model, nn.Sequential):
        return _sequential(model)
    raise ValueError(
        f"Isles cannot divide a {type(model).__name__}: use Isles' own decoder, an nn.Sequential of Linear layers, or "
        "give the model a method split_axes() (docs/own-model.md)"
    )


def _refuse_misfits(model: nn.Module, all_axes: Mapping[str, Axes]) -> None:
    """ValueError if `all_axes` does not describe the parameters of the model."""
    parameters, names = dict(model.named_parameters()), dict(model.named_parameters(remove_duplicate=False))
    for name, axes in all_axes.items():
        if name not in names:
            raise ValueError(f"split_axes() names {name!r}, which is no parameter of the model: give its full name")
        if name not in parameters:
            raise ValueError(
                f"{name} is another parameter too, and would be divided twice: do not tie divided parameters"
            )
        shape = parameters[name].shape
        sizes = [None if axis is None else axis.repeats * axis.units * axis.width for axis in axes]
        if len(sizes) != len(shape) or any(
            size not in (None, actual) for size, actual in zip(sizes, shape, strict=True)
        ):
            raise ValueError(
                f"{name} has the shape {tuple(shape)}: split_axes() must give an Axis or None for each dimension, "
                "whose repeats x units x width is its size"
            )


def _decoder(model: Decoder) -> dict[str, Axes]:
    """Axes of the decoder. Heads: query, key, value rows, output columns. MLP units: gate and up rows, down columns."""
    shape, axes = model.shape, {}
    for block in range(shape.layers):
        prefix = f"blocks.{block}"
        heads, ffn = f"{prefix}.heads", f"{prefix}.ffn"
        head = Axis(layer=heads, units=shape.heads, width=shape.head_dim, repeats=3)
        unit = Axis(layer=ffn, units=shape.ffn)
        axes[f"{prefix}.attention.qkv.weight"] = (head, None)
        axes[f"{prefix}.attention.out.weight"] = (
            None,
            Axis(layer=heads, units=shape.heads, width=shape.head_dim, reads=True),
        )
        axes[f"{prefix}.mlp.gate.weight"] = (unit, None)
        axes[f"{prefix}.mlp.up.weight"] = (unit, None)
        axes[f"{prefix}.mlp.down.weight"] = (None, Axis(layer=ffn, units=shape.ffn, reads=True))
    return axes


def _sequential(model: nn.Sequential) -> dict[str, Axes]:
    """Axes of the IST paper's network: every Linear layer but the last computes hidden units, which the next reads."""
    layers = [id(module) for module in model if any(True for _ in module.parameters())]
    if len(set(layers)) < len(layers):
        raise ValueError("a layer comes twice in this Sequential, with different units: create one for each place")
    linears = [name for name, module in model.named_children() if isinstance(module, nn.Linear)]
    axes: dict[str, Axes] = {}
    before: Axis | None = None  # the units of the layer before
    for name, module in model.named_children():
        if isinstance(module, nn.Linear):
            hidden = None if name == linears[-1] else Axis(layer=f"{name}.hidden", units=module.out_features)
            inputs = None if before is None else Axis(layer=before.layer, units=before.units, reads=True)
            axes[f"{name}.weight"] = (hidden, inputs)
            if module.bias is not None:
                axes[f"{name}.bias"] = (hidden,)
            before = hidden
        elif isinstance(module, nn.BatchNorm1d) and not module.track_running_stats:
            if module.affine:
                axes[f"{name}.weight"] = axes[f"{name}.bias"] = (before,)
        elif isinstance(module, nn.BatchNorm1d):
            raise ValueError(f"{name}: parts cannot share running statistics: set track_running_stats=False")
        elif not isinstance(module, ELEMENTWISE):
            raise ValueError(
                f"{name}: Isles cannot divide a {type(module).__name__}: use Linear, BatchNorm1d and "
                "elementwise layers, or a module with a method split_axes() (docs/own-model.md)"
            )
    return axes
