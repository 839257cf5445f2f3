"""Which units a model is made of, and the narrower model that some of them make.

    model -> split_axes: parameter name -> one `Axis` (or None) a dimension
    full tensor  -- take -->  the part of some units  -- put -->  the same places of the full tensor again
    fit: the modules learn the widths that their parameters have now

A unit is an attention head, a hidden unit of the gated MLP, a neuron of a hidden layer. It comes with all that belongs
to it: what makes it (rows) and what reads it (columns). The residual width, inputs and outputs are never divided.

A model of one's own says its units itself: a method `split_axes()` returns the mapping, and `fit_widths()`, if there is
one, is called whenever the parameters have got other widths (to set a number of heads, say).
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
    """A dimension of a parameter along which units lie, `repeats` x units x `width` entries long.

    layer: whose units: "blocks.0.ffn"; a layer is divided by itself, and the word after its last dot is the kind that
    `split` names. units: how many in the full model. width: neighbouring entries of one unit (a head's). repeats: how
    often all units come after each other (3: queries, keys, values). reads: the dimension is summed over, so a part of
    the units gives a part of the sum.
    """

    layer: str
    units: int
    width: int = 1
    repeats: int = 1
    reads: bool = False

    @property
    def kind(self) -> str:
        """What `split` calls these units."""
        return self.layer.rpartition(".")[2]


Axes = tuple[Axis | None, ...]


def split_axes(model: nn.Module, kinds: str = "all") -> dict[str, Axes]:
    """The parameters with units of `kinds` (such as "ffn", "heads+ffn", or all there are), by name. ValueError: the
    model has none, none of that kind, or parts of which it is not known how to divide them.
    """
    found = _axes(model)
    _refuse_misfits(model, found)
    known = list(dict.fromkeys(axis.kind for axes in found.values() for axis in axes if axis is not None))
    if not known:
        raise ValueError("this model has no hidden units to divide: all of its widths are inputs or outputs")
    wanted = known if kinds == "all" else kinds.split("+")
    for kind in wanted:
        if kind not in known:
            raise ValueError(f"split = {kinds!r}: this model has no {kind!r} to divide; its units: {', '.join(known)}")
    chosen = {
        name: tuple(axis if axis is not None and axis.kind in wanted else None for axis in axes)
        for name, axes in found.items()
    }
    return {name: axes for name, axes in chosen.items() if any(axes)}


def layers_of(axes: Mapping[str, Axes]) -> dict[str, int]:
    """Layers and their units, in the order of the parameters. ValueError where two parameters count differently."""
    layers: dict[str, int] = {}
    for name, each in axes.items():
        for axis in each:
            if axis is not None and layers.setdefault(axis.layer, axis.units) != axis.units:
                raise ValueError(f"{name}: {axis.layer} has {axis.units} units here and {layers[axis.layer]} elsewhere")
    return layers


def take(tensor: Tensor, axes: Axes, units: Sequence[Tensor | None]) -> Tensor:
    """The part of `tensor` that belongs to `units`: a dimension with an axis each its places, int64, counted among the
    units that the tensor holds.
    """
    for dim, (axis, indices) in enumerate(zip(axes, units, strict=True)):
        if axis is not None:
            assert indices is not None
            tensor = tensor.index_select(dim, _entries(axis, indices, tensor.shape[dim]).to(tensor.device))
    return tensor


def put(tensor: Tensor, axes: Axes, units: Sequence[Tensor | None], part: Tensor) -> None:
    """Write `part` where `take` read it."""
    index = [
        torch.arange(size) if axis is None or indices is None else _entries(axis, indices, size)
        for axis, indices, size in zip(axes, units, tensor.shape, strict=True)
    ]
    divided = [dim for dim, axis in enumerate(axes) if axis is not None]
    if len(divided) == 1:
        tensor.index_copy_(divided[0], index[divided[0]].to(tensor.device), part)
    else:
        tensor[torch.meshgrid(*(each.to(tensor.device) for each in index), indexing="ij")] = part


def fit(model: nn.Module) -> None:
    """Let the modules know the widths of their parameters."""
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
    """The indices along a dimension of `size` that belong to the units `indices`."""
    each = (indices[:, None] * axis.width + torch.arange(axis.width)).reshape(-1)
    return (torch.arange(axis.repeats)[:, None] * (size // axis.repeats) + each).reshape(-1)


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
        f"it is not known how to divide a {type(model).__name__}: use Isles' own decoder, an nn.Sequential of Linear "
        "layers, or give the model a method split_axes() (docs/own-model.md)"
    )


def _refuse_misfits(model: nn.Module, found: Mapping[str, Axes]) -> None:
    """ValueError where `found` does not describe the parameters of the model."""
    parameters, every = dict(model.named_parameters()), dict(model.named_parameters(remove_duplicate=False))
    for name, axes in found.items():
        if name not in every:
            raise ValueError(f"split_axes() names {name!r}, which is no parameter of the model: give its full name")
        if name not in parameters:
            raise ValueError(f"{name} is another parameter too, and would be divided twice: tie no divided parameters")
        shape = parameters[name].shape
        sizes = [None if axis is None else axis.repeats * axis.units * axis.width for axis in axes]
        if len(sizes) != len(shape) or any(size not in (None, own) for size, own in zip(sizes, shape, strict=True)):
            raise ValueError(
                f"{name} has the shape {tuple(shape)}: split_axes() must give an Axis or None for each dimension, "
                "whose repeats x units x width is its size"
            )


def _decoder(model: Decoder) -> dict[str, Axes]:
    """Heads: query, key and value rows, output columns. MLP units: gate and up rows, down columns."""
    shape, found = model.shape, {}
    for block in range(shape.layers):
        at = f"blocks.{block}"
        heads, ffn = f"{at}.heads", f"{at}.ffn"
        head = Axis(layer=heads, units=shape.heads, width=shape.head_dim, repeats=3)
        unit = Axis(layer=ffn, units=shape.ffn)
        found[f"{at}.attention.qkv.weight"] = (head, None)
        found[f"{at}.attention.out.weight"] = (
            None,
            Axis(layer=heads, units=shape.heads, width=shape.head_dim, reads=True),
        )
        found[f"{at}.mlp.gate.weight"] = (unit, None)
        found[f"{at}.mlp.up.weight"] = (unit, None)
        found[f"{at}.mlp.down.weight"] = (None, Axis(layer=ffn, units=shape.ffn, reads=True))
    return found


def _sequential(model: nn.Sequential) -> dict[str, Axes]:
    """The IST paper's network: every Linear layer but the last gives hidden units, which the next one reads."""
    widths = [id(module) for module in model if any(True for _ in module.parameters())]
    if len(set(widths)) < len(widths):
        raise ValueError("a layer comes twice in this Sequential, once for other units: make one for each place")
    linears = [name for name, module in model.named_children() if isinstance(module, nn.Linear)]
    found: dict[str, Axes] = {}
    before: Axis | None = None  # the units that come in
    for name, module in model.named_children():
        if isinstance(module, nn.Linear):
            own = None if name == linears[-1] else Axis(layer=f"{name}.hidden", units=module.out_features)
            into = None if before is None else Axis(layer=before.layer, units=before.units, reads=True)
            found[f"{name}.weight"] = (own, into)
            if module.bias is not None:
                found[f"{name}.bias"] = (own,)
            before = own
        elif isinstance(module, nn.BatchNorm1d) and not module.track_running_stats:
            if module.affine:
                found[f"{name}.weight"] = found[f"{name}.bias"] = (before,)
        elif isinstance(module, nn.BatchNorm1d):
            raise ValueError(f"{name}: running statistics are of one network: set track_running_stats=False")
        elif not isinstance(module, ELEMENTWISE):
            raise ValueError(
                f"{name}: it is not known how to divide a {type(module).__name__}: use Linear, BatchNorm1d and "
                "elementwise layers, or a module with a method split_axes() (docs/own-model.md)"
            )
    return found
