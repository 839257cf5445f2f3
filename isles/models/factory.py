"""From a `ModelConfig` to a model on its device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .config import ModelConfig
from .decoder import Decoder

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def device_of(config: ModelConfig, rank: int = 0) -> torch.device:
    """Where worker `rank` computes: with a GPU, cuda:(rank mod number of GPUs), so that workers may share one.

    ValueError: `device = "cuda"` where torch sees none; fp16 autocast without a GPU.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and not gpus:
        raise ValueError('model.device = "cuda", but torch sees no GPU here: use "auto" or "cpu"')
    device = torch.device("cuda", rank % gpus) if gpus and config.device != "cpu" else torch.device("cpu")
    if config.autocast == "fp16" and device.type == "cpu":
        raise ValueError('model.autocast = "fp16" needs a GPU, and torch sees none here: use "bf16" or "none"')
    return device


def build(config: ModelConfig, seed: int, rank: int = 0) -> Any:
    """The decoder that `config` describes, for worker `rank`; weights are drawn from `seed` alone."""
    model = Decoder(config.shape(), seed=seed, device=device_of(config, rank), dtype=getattr(torch, config.dtype))
    if config.compile:
        model.compile()  # in place: parameter names stay what they are
    return model


def autocast(config: ModelConfig, device: torch.device) -> AbstractContextManager[Any]:
    """The context for forward passes. fp16 also wants a torch.amp.GradScaler, or small gradients become zero."""
    if config.autocast == "none":
        return nullcontext()
    return torch.autocast(device.type, dtype=_AUTOCAST[config.autocast])
