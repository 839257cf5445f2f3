"""Names of a model's tensors, by which workers and checkpoints agree on what is what."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import chain

from torch import Tensor, nn
from torch.optim import Optimizer

_WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def clean_names(model: nn.Module, tensors: Sequence[Tensor]) -> list[str]:
    """Of parameters and buffers of `model`, without what wrappers such as torch.compile put before them."""
    names = {id(tensor): name for name, tensor in chain(model.named_buffers(), model.named_parameters())}
    return [clean_name(names[id(tensor)]) for tensor in tensors]


def clean_name(name: str) -> str:
    """One of them, or the beginning of one."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def all_names(model: nn.Module) -> list[str]:
    """`clean_names` of parameters and buffers, in the order in which all workers must have them."""
    return clean_names(model, [*model.parameters(), *model.buffers()])


def warn_if_not_held(model: nn.Module, parameters: Sequence[Tensor], inner: Optimizer, method: str) -> None:
    """A warning that names trainable parameters which the inner optimizer does not step."""
    held = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    names = clean_names(model, [parameter for parameter in parameters if id(parameter) not in held])
    if names:
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        warnings.warn(
            f"{len(names)} trainable parameters ({shown}) are not in the optimizer that {method} has around it: they "
            "are exchanged too, but what steps them is not in its state, clipping and scaling. Wrap all optimizers of "
            f"the model together, isles.{method}(model, [muon, adamw], ...), or freeze them",
            stacklevel=3,
        )
