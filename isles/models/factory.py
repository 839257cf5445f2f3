"""From a `[model]` section to a model that trains: device, number format, compilation and autocast."""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from .config import ModelConfig
from .decoder import Decoder
from .hf import load_hf
from .own import make, sketch_own

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(config: ModelConfig, rank: int = 0) -> torch.device:
    """Where worker `rank` of this machine computes: GPU rank modulo its GPUs, so workers may share one; the GPU that
    `model.device` numbers; else the CPU. ValueError where torch does not see the GPU.
    """
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    kind, _, number = config.device.partition(":")
    index = int(number) if number else rank % max(gpus, 1)
    if index < gpus:
        return torch.device("cuda", index)
    if kind == "cuda":
        raise ValueError(
            f'model.device = "{config.device}" but torch sees {gpus or "no"} GPU{"s" * (gpus > 1)} here; use '
            'model.device = "cpu" or "auto" (or --device), or install a CUDA build of torch'
        )
    return torch.device("cpu")


def take_device(config: ModelConfig, rank: int) -> torch.device:
    """`choose_device`, and make a GPU this thread's current one: torch's fully_shard and NCCL use that one."""
    device = choose_device(config, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def placement(config: ModelConfig, workers: int) -> str:
    """Where `workers` workers of this machine train, and how many share a GPU or are idle. ValueError: they cannot."""
    _refuse_fp16_on_cpu(config, choose_device(config))
    used = Counter(str(choose_device(config, rank)) for rank in range(workers))
    most, idle = max(used.values()), torch.cuda.device_count() - len(used.keys() - {"cpu"})
    line = f"{workers} worker{'s' * (workers > 1)} on {', '.join(used)}"
    if most > 1 and "cpu" not in used:
        line += f"; up to {most} share a GPU, whose memory must hold as many models"
    return line + (f"; GPUs idle: {idle} (model.device, or more workers, would use them)" if idle else "")


def build(config: ModelConfig, seed: int, rank: int = 0, home: torch.device | None = None) -> nn.Module:
    """The model of `config` for worker `rank`, in `model.dtype`, compiled where that was asked for. home: where its
    weights lie; None for where the worker computes.

    The weights depend on the configuration and `seed` alone: every rank and every device starts from the same model,
    and the global random generators stay as they were. A compiled model is compiled in place: its parameter names and
    its class are those of the plain one. ValueError as in `choose_device`, `autocast`, `load_hf` and `own.make`.
    """
    device = choose_device(config, rank)
    _refuse_fp16_on_cpu(config, device)
    model = _made(config, seed, home or device)
    if config.compile:
        model.compile()
    return model


def sketch(config: ModelConfig) -> nn.Module:
    """The model of `config` with shapes but without numbers (on the meta device): no memory, whatever its size."""
    if config.factory is not None:
        return sketch_own(config.factory, config.options or {}, DTYPES[config.dtype])
    return _made(config, 0, torch.device("meta"))


def _made(config: ModelConfig, seed: int, device: torch.device) -> nn.Module:
    dtype = DTYPES[config.dtype]
    if config.factory is not None:
        return make(config.factory, config.options or {}, seed).to(device=device, dtype=dtype)
    if config.hf is not None:
        return load_hf(config.hf, seed=seed, dtype=dtype, device=device, vocab=config.vocab)
    return Decoder(config.shape(), seed=seed, device=device, dtype=dtype)


def autocast(config: ModelConfig, device: torch.device) -> AbstractContextManager[object]:
    """The context in which the forward pass runs; it does nothing for `model.autocast = "none"`.

        with autocast(config, device):
            loss = model(tokens).loss
        loss.backward()

    "bf16" needs nothing else. "fp16" is for CUDA and needs a `torch.amp.GradScaler`, for small gradients underflow
    without one. ValueError for "fp16" on a CPU; a warning for "bf16" on a GPU that only emulates it.
    """
    if config.autocast == "none":
        return nullcontext()
    _refuse_fp16_on_cpu(config, device)
    if (
        config.autocast == "bf16"
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        warnings.warn(
            'model.autocast = "bf16" is emulated on this GPU and slow; use "fp16" with a GradScaler, or "none"',
            stacklevel=2,
        )
    return torch.autocast(device.type, dtype=AUTOCAST_DTYPES[config.autocast])


def _refuse_fp16_on_cpu(config: ModelConfig, device: torch.device) -> None:
    if config.autocast == "fp16" and device.type == "cpu":
        raise ValueError(
            'model.autocast = "fp16" needs a GPU and this worker computes on the CPU; use "bf16" or "none"'
        )
