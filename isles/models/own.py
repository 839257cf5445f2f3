"""Models of the user's own: `model.factory = "package.module:function"` calls it, checks what it gives, asks it for
scores.

The contract (docs/own-model.md): the function returns an `nn.Module`; called with windows `tokens` (B, T+1), int64, the
module returns an object with `.loss`, the mean cross-entropy in nats of the T tokens after the first (a scalar that
gradients flow from). With `.logits` (B, T, V) on it, the scores of those T tokens, generation and multiple choice work
too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from isles.imports import named, told


def make(place: str, options: Mapping[str, Any], seed: int) -> nn.Module:
    """What the function at `place` returns for `options`, in training mode. The weights depend on the options and
    `seed`, as far as they are drawn from torch's CPU generator, which stays as it was. ValueError: it cannot be
    imported, raises, or returns no module.
    """
    key = f"model.factory = {place!r}"
    function = named(key, place)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = function(**options)
    except Exception as error:  # the function is the user's: whatever it raises
        raise ValueError(f"{key} fails: {told(error)}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{key} returns a {type(model).__name__}: return a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"{key} returns a model without trainable parameters: there is nothing to train")
    return model.train()


def sketch_own(place: str, options: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """As `make`, without numbers: on the meta device, floating-point tensors in `dtype`. A function that cannot do
    without numbers is called on the CPU and its result stripped of them.
    """
    try:
        with torch.device("meta"):
            model = make(place, options, 0)
    except ValueError:
        model = make(place, options, 0)
    empty: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = empty.setdefault(id(tensor), _without_numbers(tensor, dtype))  # type: ignore[assignment]
    return model


def _without_numbers(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    dtype = dtype if tensor.is_floating_point() else tensor.dtype
    if tensor.is_meta and tensor.dtype == dtype:
        return tensor
    bare = torch.empty_like(tensor, device="meta", dtype=dtype)
    return nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare


def check_contract(model: nn.Module, place: str, context: int) -> None:
    """One forward pass of one sequence, before anything is trained. ValueError: it fails, or gives no loss to train
    on.
    """
    key = f"model.factory = {place!r}"
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[]):
        model.eval()
        try:
            output = model(torch.zeros(1, context + 1, dtype=torch.int64, device=device))
        except Exception as error:  # the model is the user's: whatever it raises
            raise ValueError(f"{key}: its model fails on tokens (1, {context + 1}): {told(error)}") from error
        finally:
            model.train()
    loss = getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a {type(output).__name__} without a scalar .loss" if loss is None else "a .loss that is no scalar"
        raise ValueError(f"{key}: its model returns {what}: return an object such as isles.models.Output(loss, logits)")
    if not loss.requires_grad:
        raise ValueError(f"{key}: no gradient flows from its model's .loss: compute it from the parameters, undetached")


@torch.no_grad()
def next_token_scores(model: Any, tokens_BT: Tensor) -> Tensor:
    """Scores (B, T, V) for the token after each of `tokens_BT`, int64, of any model that trains here. ValueError for
    one that gives no logits.
    """
    if callable(getattr(model, "logits", None)):
        return model.logits(tokens_BT)
    window = torch.cat((tokens_BT, tokens_BT[:, -1:]), dim=1)  # the last one only stands where the answer would
    logits = getattr(model(window), "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != tokens_BT.shape:
        raise ValueError(
            "this run's model gives no .logits of shape (B, T, V) beside its .loss, and they are needed to generate or "
            "to choose: return them, see docs/own-model.md"
        )
    return logits
