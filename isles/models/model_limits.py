"""Limits and size of the model of a `[model]` section, before it is built. Loads no torch for Isles' own decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from isles.models.config import ModelConfig
from isles.models.sizes import parameters

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


class Limits(NamedTuple):
    """Limits for the data. context: the longest sequence, in tokens. vocab: number of token ids; None: not known."""

    context: int
    vocab: int | None


def limits(config: ModelConfig) -> Limits:
    """The limits of the model of `config`, without building it. ValueError if they are unknown or impossible."""
    if config.factory is not None:
        assert config.context is not None
        return Limits(config.context, config.vocab)
    if config.hf is None:
        shape = config.shape()
        return Limits(shape.context, shape.vocab)
    from isles.models.hf import hf_limits

    longest, vocab = hf_limits(config.hf)
    context = config.context or longest
    if context is None:
        raise ValueError("model.context is missing: config.json of model.hf does not say how long a sequence may be")
    if longest is not None and context > longest:
        raise ValueError(
            f"model.context = {context} is more than the {longest} of model.hf: set it to {longest} or less"
        )
    return Limits(context, config.vocab or vocab)


def state_bytes(config: ModelConfig) -> int:
    """Bytes of the model's state dict, a tied matrix counted twice. ValueError or OSError if it cannot be sketched."""
    if config.own is None:
        return _ITEM_BYTES[config.dtype] * parameters(replace(config.shape(), tie_embeddings=False))
    from isles.models.factory import sketch

    return sum(tensor.numel() * tensor.element_size() for tensor in sketch(config).state_dict().values())
